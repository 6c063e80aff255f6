"""Isthmus and its peers on the same weights: TTFT, TPOT, tokens/s, memory, start time.

``python -m benchmarks.engine`` starts one server after the other, gives each the whole machine,
measures it ``--rounds`` times and writes a table, a plot and the raw figures. What each module
owns: ``measure`` the load, ``bounds`` the limits that figures are shares of, ``report`` what is
printed; who the peers are and how they start is in ``benchmarks.peers``.
"""
