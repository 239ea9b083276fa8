"""The first thing that runs on a host: makes the shipped sources the importable package `orch_remote`, then calls one.

Standard input holds, after this file: one JSON line {"program": NAME, "limit_s": whole seconds, "sources": {module:
text}}, one JSON line that is the request, and whatever bytes the request announces. After the limit the kernel ends us:
by then nobody waits for the answer. This file must be readable by any Python 3, so that an old one
gets an answer in words and not a SyntaxError.
"""

import json
import os
import signal
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec


class Shipped:
    """Finds and loads modules from a dictionary of name -> source text."""

    def __init__(self, sources):
        self.sources = sources

    def find_spec(self, name, path=None, target=None):
        if name not in self.sources:
            return None
        return ModuleSpec(name, self, is_package=name == "orch_remote")

    def get_source(self, name):
        return self.sources[name]

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(compile(self.sources[module.__name__], module.__name__, "exec"), module.__dict__)


def main():
    shipped = json.loads(sys.stdin.buffer.readline().decode())
    request = json.loads(sys.stdin.buffer.readline().decode())
    signal.alarm(shipped["limit_s"])  # in place of the one that watched over our way here
    if sys.version_info < (3, 10):  # noqa: UP036 - this file alone is read by whatever Python a host has
        found = "python {}.{}.{} ({}) is too old".format(*sys.version_info[:3], sys.executable)
        answer = {"error": found, "remedy": "set `python:` or `activate:` to a Python 3.10 or newer on this host"}
        sys.stdout.write(request["marker"] + json.dumps(answer) + request["marker"])
        return
    # `sources` stays at hand: `prepare` writes the package into the job's folder for the supervisor.
    sys.meta_path.insert(0, Shipped(shipped["sources"]))
    import_module("orch_remote").SOURCES = shipped["sources"]
    import_module("orch_remote." + shipped["program"]).main(request)
    sys.stdout.flush()
    os._exit(0)  # to take an interpreter apart is a tenth of what a short program costs


main()
