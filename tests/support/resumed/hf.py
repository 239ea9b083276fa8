"""A tiny language model under Hugging Face's Trainer, which keeps its checkpoints in out/; --resume goes on."""

import hashlib
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

LENGTH = 32


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 1280

    def __getitem__(self, index):
        words = torch.randint(200, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


class Says(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        print(f"saved: step {state.global_step}", flush=True)

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step:
            print(f"resumed after step {state.global_step}", flush=True)


def main():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=200, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4))
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=8, num_train_epochs=3, report_to=[], save_steps=80, save_total_limit=2,
        disable_tqdm=True, use_cpu=True, ddp_backend="gloo", logging_strategy="no", eval_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Text(), callbacks=[Says()])
    trainer.train(resume_from_checkpoint="--resume" in sys.argv)
    digest = hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in model.parameters()))
    print("weights", digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
