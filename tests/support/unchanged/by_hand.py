"""A stopwatch for a training script that times itself: what each step's parts took, printed as one line at the end.

The end of a rank's own backward is when the last weight's gradient has been handed over, by a hook at each of them
behind that of DistributedDataParallel.
"""

import json
import time


class Hand:
    def __init__(self, model):
        self.parts = {"load": [], "compute": [], "exposed": [], "optim": []}
        self.spent_s = dict.fromkeys(self.parts, 0.0)
        self.begin()
        self.nodes = [weight.expand_as(weight).grad_fn.next_functions[0][0] for weight in model.parameters()]
        for node in self.nodes:
            node.register_hook(self._has_gradient)

    def _has_gradient(self, *gradients):
        self.last_gradient_s = time.perf_counter()

    def begin(self):
        """Nothing before this counts."""
        self.last_s = time.perf_counter()

    def ends(self, part):
        """What has passed belongs to this part."""
        now_s = time.perf_counter()
        self.spent_s[part] += now_s - self.last_s
        self.last_s = now_s

    def ends_backward(self):
        self.spent_s["compute"] += self.last_gradient_s - self.last_s
        self.last_s = self.last_gradient_s
        self.ends("exposed")

    def ends_step(self):
        self.ends("optim")
        for part, spent_s in self.spent_s.items():
            self.parts[part].append(1000 * spent_s)
        self.spent_s = dict.fromkeys(self.parts, 0.0)

    def show(self):
        print("BY HAND " + json.dumps(self.parts), flush=True)
