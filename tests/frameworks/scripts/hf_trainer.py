# app: hf
"""transformers' Trainer on a small causal language model, as in its tutorial."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

settings = {"output_dir": tempfile.mkdtemp(), "report_to": "none", "save_strategy": "no", "logging_steps": 1}


def train(on_step):
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    ids = torch.randint(64, (160, 12))
    losses = []

    class OnStep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            on_step(state.global_step - 1)

        def on_log(self, args, state, control, logs, **kwargs):
            losses.extend([logs["loss"]] if "loss" in logs else [])

    trainer = Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            **settings, use_cpu=True, per_device_train_batch_size=4, num_train_epochs=1, learning_rate=0.01
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[OnStep()],
    )
    trainer.train()
    assert trainer.args.world_size == 2
    return losses
