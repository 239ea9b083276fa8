"""A small network under Lightning, with a data set and a loop that are Lightning's own business."""

import os

import lightning
import torch
from torch import nn


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        inputs = torch.randn(256, generator=torch.Generator().manual_seed(index))
        return inputs, (inputs.sum() > 0).long()


class Judge(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 2)
        )

    def training_step(self, batch, number):
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main():
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), devices="auto", accelerator="cpu", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model := Judge(), torch.utils.data.DataLoader(Points(), 16, shuffle=True))
    weights = sum(weight.double().sum().item() for weight in model.parameters())
    print(f"ranks {trainer.world_size}, steps {trainer.global_step}, weights {weights!r}")


if __name__ == "__main__":
    main()
