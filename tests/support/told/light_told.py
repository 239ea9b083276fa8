"""light.py with a validation, unequal batches and gradients of two batches an update, and the callback."""

import os

import lightning
import torch
from light import Judge, Points
from torch import nn

from trainer.integrations.lightning import OrchCallback

COUNT = 600
"""Of 300 a rank, 18 batches of 16 and one of 12; 10 updates, the last of the short batch alone."""


class Told(Judge):
    def __init__(self):
        super().__init__()
        self.counted, self.losses = [], []

    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.counted.append(len(batch[1]))
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, number):
        inputs, targets = batch
        outputs = self.layers(inputs)
        self.log("val_acc", (outputs.argmax(1) == targets).float().mean(), sync_dist=True)
        self.log("val_loss", nn.functional.cross_entropy(outputs, targets), sync_dist=True)


def main():
    lightning.seed_everything(0, verbose=False)
    points = torch.utils.data.Subset(Points(), range(COUNT))
    trainer = lightning.Trainer(
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), devices="auto", accelerator="cpu", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2,
        callbacks=[OrchCallback()],
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(points, 16, shuffle=True)
    trainer.fit(model := Told(), loader, torch.utils.data.DataLoader(points, 50))
    print("COUNTED", model.counted, "LOSSES", model.losses, "ACCURACY", trainer.callback_metrics["val_acc"].item())


if __name__ == "__main__":
    main()
