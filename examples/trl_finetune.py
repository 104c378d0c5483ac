"""TRL: FIRE in supervised fine-tuning, DPO and GRPO, with one callback. Everything is made locally and tiny.

Two pitfalls of reinforcement learning: one generation serves several optimizer steps (`steps_per_generation` times
`num_iterations`), so act at multiples of that number; the reference model is not changed.

    python examples/trl_finetune.py grpo --steps 12
"""

import argparse
import copy
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import rekindle
from rekindle.integrations.transformers import RekindleCallback

QUESTIONS = ["two and two is ", "three and one is ", "one and one is ", "five and two is "] * 8


def bytewise() -> PreTrainedTokenizerFast:
    letters = ["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<pad>")


def short(completions, **_):
    """A reward: shorter is better."""
    return [-float(len(text)) for text in completions]


def train(kind: str, steps: int, every: int):
    """The callback after `steps` optimizer steps."""
    tokenizer = bytewise()
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
            pad_token_id=0,
        )
    )  # fmt: skip
    method = rekindle.methods.FIRE(
        targets="mlp", scale="nearest"
    )  # few targets and the nearest scale: it was pretrained
    callback = RekindleCallback(method, every=every, rewarm=2)
    common = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 4, "max_steps": steps, "use_cpu": True,
        "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 2,
    }  # fmt: skip
    given = {"processing_class": tokenizer, "callbacks": [callback]}
    if kind == "sft":
        rows = Dataset.from_dict({"text": [question + "four" for question in QUESTIONS]})
        trainer = SFTTrainer(model, SFTConfig(max_length=48, **common), train_dataset=rows, **given)
    elif kind == "dpo":
        pairs = {"chosen": ["four"] * len(QUESTIONS), "rejected": ["a lot"] * len(QUESTIONS)}
        rows = Dataset.from_dict({"prompt": QUESTIONS, **pairs})
        reference = copy.deepcopy(model)  # TRL would load it from the hub, where this model is not
        trainer = DPOTrainer(model, reference, DPOConfig(max_length=48, **common), train_dataset=rows, **given)
    else:
        options = GRPOConfig(
            num_generations=4, max_completion_length=8, steps_per_generation=2, num_iterations=1, **common
        )
        rows = Dataset.from_dict({"prompt": QUESTIONS})
        trainer = GRPOTrainer(model, reward_funcs=short, args=options, train_dataset=rows, **given)
    trainer.train()
    return callback


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["sft", "dpo", "grpo"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=4)
    arguments = parser.parse_args()
    for firing in train(arguments.kind, arguments.steps, arguments.every).firings:
        print(firing)
