"""First program on a host: makes the shipped modules importable as package `orch_remote`, and runs one of them.

Standard input after this file: a JSON line {"program": NAME, "limit_s": whole seconds, "sources": {module: [bytes of
text, bytes of bytecode]}, "bytes": N}, a JSON line with the request, N bytes with all texts and bytecodes compressed,
then the bytes that the request announces. After limit_s the kernel ends us. This file has to be valid in any Python 3,
so that an old one gets a message instead of a SyntaxError.
"""

import json
import os
import signal
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader


class Shipped(SourceFileLoader):
    """A shipped module, run from its bytecode if Python's version fits, otherwise from its text. Reads and writes no
    file.
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
    signal.alarm(shipped["limit_s"])  # replaces the shell's alarm for the way here
    if sys.version_info < (3, 10):  # noqa: UP036 - any Python that a host has reads this file
        found = "python {}.{}.{} ({}) is too old".format(*sys.version_info[:3], sys.executable)
        answer = {"error": found, "remedy": "set `python:` or `activate:` to a Python 3.10 or newer on this host"}
        sys.stdout.write(request["marker"] + json.dumps(answer) + request["marker"])
        return
    import zlib

    modules = unpacked(shipped["sources"], zlib.decompress(sys.stdin.buffer.read(shipped["bytes"])))
    # `prepare` writes them into the job's folder for the supervisor.
    sys.meta_path.insert(0, Finder(modules))
    import_module("orch_remote").MODULES = modules
    import_module("orch_remote." + shipped["program"]).main(request)
    sys.stdout.flush()
    os._exit(0)  # taking the interpreter down takes a tenth of a short program's time


main()
