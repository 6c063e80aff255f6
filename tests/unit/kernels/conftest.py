"""Files marked ``interpreted`` run under Triton's interpreter, in a process of their own."""

from tests.support.triton_interpreter import interpreter_process, pytest_pyfunc_call

__all__ = ["interpreter_process", "pytest_pyfunc_call"]
