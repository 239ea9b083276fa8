"""The first thing that runs on a host: makes the shipped modules the importable package `orch_remote`, then calls one.

Standard input holds, after this file: one JSON line {"program": NAME, "limit_s": whole seconds, "sources": {module:
[bytes of its text, bytes of its bytecode]}, "bytes": N}, one JSON line that is the request, N bytes that are all
those texts and bytecodes compressed, and whatever bytes the request announces. After the limit the kernel ends us:
by then nobody waits for the answer. This file must be readable by any Python 3, so that an old one
gets an answer in words and not a SyntaxError.
"""

import json
import os
import signal
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader


class Shipped(SourceFileLoader):
    """A module that was sent: Python takes its bytecode where that is of its own version, and compiles its text where
    it is not. Nothing is read from this host or left on it.
    """

    def __init__(self, name, text, bytecode):
        SourceFileLoader.__init__(self, name, name)
        self.text, self.bytecode = text, bytecode

    def path_stats(self, path):
        return {"mtime": 0, "size": len(self.text)}

    def get_data(self, path):
        return self.text if path == self.path else self.bytecode

    def set_data(self, path, data, **more):
        pass


class Finder:
    """Finds modules in a dictionary of name -> (text, bytecode)."""

    def __init__(self, modules):
        self.modules = modules

    def find_spec(self, name, path=None, target=None):
        if name not in self.modules:
            return None
        return ModuleSpec(name, Shipped(name, *self.modules[name]), is_package=name == "orch_remote")


def unpacked(sizes, content):
    modules, start = {}, 0
    for name, (text, bytecode) in sizes.items():
        middle, end = start + text, start + text + bytecode
        modules[name] = (content[start:middle], content[middle:end])
        start = end
    return modules


def main():
    shipped = json.loads(sys.stdin.buffer.readline().decode())
    request = json.loads(sys.stdin.buffer.readline().decode())
    signal.alarm(shipped["limit_s"])  # in place of the one that watched over our way here
    if sys.version_info < (3, 10):  # noqa: UP036 - this file alone is read by whatever Python a host has
        found = "python {}.{}.{} ({}) is too old".format(*sys.version_info[:3], sys.executable)
        answer = {"error": found, "remedy": "set `python:` or `activate:` to a Python 3.10 or newer on this host"}
        sys.stdout.write(request["marker"] + json.dumps(answer) + request["marker"])
        return
    import zlib

    modules = unpacked(shipped["sources"], zlib.decompress(sys.stdin.buffer.read(shipped["bytes"])))
    # They stay at hand: `prepare` writes the package into the job's folder for the supervisor.
    sys.meta_path.insert(0, Finder(modules))
    import_module("orch_remote").MODULES = modules
    import_module("orch_remote." + shipped["program"]).main(request)
    sys.stdout.flush()
    os._exit(0)  # to take an interpreter apart is a tenth of what a short program costs


main()
