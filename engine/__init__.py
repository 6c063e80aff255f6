"""One instance's engine. A step: ``scheduler`` plans, ``batch`` builds, the model runs, ``sampler``
draws, ``core`` enters the results. ``owners`` says who owns which KV blocks, ``kv_manager`` and
``block_pool`` keep count of them, ``kv_store`` holds their bytes.
"""

__all__: list[str] = []
