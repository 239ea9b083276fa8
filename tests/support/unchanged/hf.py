"""A tiny language model under Hugging Face's Trainer."""

# by hand: from by_hand import Hand
import hashlib

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

LENGTH = 48


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        words = torch.randint(500, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


class ByHand(TrainerCallback):
    """The parts of a step between the trainer's own calls; what is behind the last gradient cannot be divided there."""

    def on_epoch_begin(self, *args, **kwargs):
        self.hand = getattr(self, "hand", None) or Hand(kwargs["model"])  # noqa: F821
        self.hand.begin()

    def on_step_begin(self, *args, **kwargs):
        self.hand.ends("load")

    def on_optimizer_step(self, *args, **kwargs):
        self.hand.ends_backward()
        self.hand.ends_step()


def main():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_positions=LENGTH, n_embd=96, n_layer=2, n_head=4))
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=8, num_train_epochs=1, report_to=[], save_strategy="no", disable_tqdm=True,
        use_cpu=True, ddp_backend="gloo", logging_strategy="no", eval_strategy="epoch",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Text(), eval_dataset=Text())
    # by hand: trainer.add_callback(byhand := ByHand())
    trainer.train()
    digest = hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in model.parameters()))
    print("weights", digest.hexdigest())
    # by hand: byhand.hand.show()


if __name__ == "__main__":
    main()
