"""hf.py with two epochs, unequal batches, gradients of two batches an update, an accuracy, and the callback."""

import torch
from hf import LENGTH, Text
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from trainer.integrations.huggingface import OrchCallback

COUNT = 300
"""Of 150 a rank, 18 batches of 8 and one of 6; 10 updates."""


class Counting(Trainer):
    counted, losses = [], []

    def training_step(self, model, inputs, *args, **named):
        self.counted.append(len(inputs["input_ids"]))
        return super().training_step(model, inputs, *args, **named)

    def log(self, logs, *args, **named):
        self.losses.extend([logs["loss"]] if "loss" in logs else [])
        super().log(logs, *args, **named)


def accuracy(prediction):
    guessed = prediction.predictions[:, :-1].argmax(-1)
    return {"accuracy": float((guessed == prediction.label_ids[:, 1:]).mean())}


def main():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_positions=LENGTH, n_embd=96, n_layer=1, n_head=4))
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=8, gradient_accumulation_steps=2, num_train_epochs=2, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_steps=5, eval_strategy="epoch", learning_rate=1e-3,
    )  # fmt: skip
    text = torch.utils.data.Subset(Text(), range(COUNT))
    few = torch.utils.data.Subset(Text(), range(16))
    trainer = Counting(
        model, arguments, train_dataset=text, eval_dataset=few, compute_metrics=accuracy, callbacks=[OrchCallback()]
    )
    trainer.train()
    evaluated = [entry["eval_accuracy"] for entry in trainer.state.log_history if "eval_accuracy" in entry]
    print("COUNTED", trainer.counted, "LOSSES", trainer.losses, "ACCURACY", evaluated[-1])


if __name__ == "__main__":
    main()
