"""`make gpu`: what orch does on your GPUs, in 20 minutes and one file. See docs/gpu.md.

    python -m tests.gpu [--parts alone,two] [--mnist DIR] [--minutes 20] [--out DIR]

`__main__` plays the parts of `parts/` one after the other; each gives rows (`row`), measured with real runs of the
trainer (`runs`) and held against what was expected (`expected`). `parcel` packs what came of it. All of this needs the
standard library alone; torch is imported by the processes that it starts. `test_*.py` are the tests marked gpu.
"""
