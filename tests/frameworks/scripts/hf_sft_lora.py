# app: hf
"""trl's SFTTrainer with peft's LoRA, on a small causal language model with words as tokens."""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

folder = tempfile.mkdtemp()
words = [*(f"w{number}" for number in range(40)), "<pad>", "</s>"]
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "w0")),
    pad_token="<pad>",
    eos_token="</s>",
)
tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


def train(on_step):
    set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes))
    texts = [" ".join(words[number] for number in torch.randint(40, (10,))) for _ in range(160)]
    losses = []

    class OnStep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            on_step(state.global_step - 1)

        def on_log(self, args, state, control, logs, **kwargs):
            losses.extend([logs["loss"]] if "loss" in logs else [])

    settings = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "use_cpu": True, "bf16": False}
    trainer = SFTTrainer(
        model,
        SFTConfig(folder, **settings, per_device_train_batch_size=4, num_train_epochs=1, learning_rate=0.01),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        callbacks=[OnStep()],
    )
    trainer.train()
    assert trainer.args.world_size == 2
    return losses
