"""What `probe` asks in a process of its own: programs that may hang, or take torch along. Each prints JSON."""

# Prints the numeric addresses that this host's own name leads to: a resolver may take its time.
OWN_NAME = """
import json, socket
found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
print(json.dumps(sorted({entry[4][0].partition("%")[0] for entry in found})))
"""

# Prints {name: numeric address} of what was found in time. All at once: a dead resolver takes its time for each.
NAMES = """
import json, os, queue, socket, sys, threading, time
end = time.monotonic() + float(sys.argv[1])
todo, found = queue.SimpleQueue(), {}
def look_up():
    while True:
        try:
            name = todo.get_nowait()
            found[name] = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
        except queue.Empty:
            return
        except (OSError, ValueError):
            pass
for name in sys.argv[2:]:
    todo.put(name)
threads = [threading.Thread(target=look_up, daemon=True) for _ in sys.argv[2:][:256]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(max(0, end - time.monotonic()))
print(json.dumps(dict(found)), flush=True)
os._exit(0)
"""

COMPUTES = "computes"
# Prints what this torch is. A part that this build or version lacks is null, never a failure of the whole. With the
# argument COMPUTES each GPU also multiplies a matrix: {index: what went wrong, or null}.
TORCH = """
import ctypes, importlib.metadata, json, os, subprocess, sys, threading, types, warnings
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi counts them
class Compiler(types.ModuleType):
    # In place of torch's, which torchvision imports, uses for nothing here, and which takes longer than all the rest.
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None
def vision():
    # What it says of itself; "" where it does not load.
    try:
        for name in ("torch._dynamo", "torch._dynamo.utils"):
            sys.modules.setdefault(name, Compiler(name))
        import torchvision
        return str(torchvision.__version__)
    except Exception:
        return ""
def attempt(ask):
    try:
        return ask()
    except Exception:
        return None
import torch
import torch.distributed as dist
facts = {"version": str(torch.__version__), "cuda": torch.version.cuda}
facts["nccl"] = attempt(lambda: ".".join(str(part) for part in torch.cuda.nccl.version()))
# Without this library NCCL uses no InfiniBand device, whatever the kernel lists.
facts["verbs"] = bool(attempt(lambda: ctypes.CDLL("libibverbs.so.1")))
facts["cudnn"] = attempt(lambda: str(torch.backends.cudnn.version() or "")) or None
# get_arch_list() is empty where no GPU is in reach; the flags of the build are there always.
facts["arch_list"] = attempt(lambda: (torch._C._cuda_getArchFlags() or "").split())
facts["arch_list"] = facts["arch_list"] or attempt(torch.cuda.get_arch_list) or []
distributed = dist.is_available()
facts["gloo"] = bool(distributed and attempt(getattr(dist, "is_gloo_available", lambda: True)))
facts["nccl_available"] = bool(distributed and attempt(lambda: dist.is_nccl_available()))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    facts["devices"] = attempt(lambda: torch.cuda.device_count() if torch.cuda.is_available() else 0) or 0
facts["cuda_error"] = str(said[-1].message) if said else None
if sys.argv[1:] == ["computes"]:
    facts["computes"] = dict.fromkeys(map(str, range(facts["devices"])), "no answer in 20 s")
    def compute():
        for index in range(facts["devices"]):
            try:
                square = torch.ones(64, 64, device="cuda:%d" % index)
                facts["computes"][str(index)] = None if float((square @ square)[0, 0]) == 64 else "a wrong product"
            except Exception as error:
                facts["computes"][str(index)] = str(error).strip().split("\\n")[0]
    computing = threading.Thread(target=compute, daemon=True)
    computing.start()
    computing.join(20)
facts["horovod"] = attempt(lambda: importlib.metadata.version("horovod"))
facts["torchvision"] = facts["torchvision_error"] = None
if found := vision():
    facts["torchvision"] = found
else:
    plainly = "import torchvision; print(); print(torchvision.__version__)"
    done = subprocess.run([sys.executable, "-c", plainly], capture_output=True, text=True, errors="replace")
    said = (done.stderr if done.returncode else done.stdout).strip().splitlines() or ["exit code %d" % done.returncode]
    facts["torchvision_error" if done.returncode else "torchvision"] = said[-1]
print("\\n" + json.dumps(facts), flush=True)
os._exit(0)  # to take torch down takes as long as a quarter of its start
"""
