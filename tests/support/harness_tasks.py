"""Small tasks of EleutherAI's harness, and what the harness itself says of a model on them."""

import json
from pathlib import Path
from typing import Any

from optkit_evals.harness.asking import FEW_SHOT_SEED, Asking
from optkit_evals.harness.task import HarnessTask

CHOICES = """task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: colours.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_target: gold
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata: {version: 2.0}
"""
ROLLING = """task: prose
dataset_path: json
dataset_kwargs: {data_files: {test: colours.jsonl}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""
WRITING = """task: writing
dataset_path: json
dataset_kwargs: {data_files: {test: colours.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 12, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
ITEMS = 20


def write_tasks(tmp_path: Path) -> dict[str, str]:
    """Return a multiple choice, a text and a question that is answered in words, on the same items."""
    for name, text in (("colours", CHOICES), ("prose", ROLLING), ("writing", WRITING)):
        (tmp_path / f"{name}.yaml").write_text(text)
    names = ["red", "dark blue", "green", "rose", "as white as snow"]
    rows = [
        {
            "question": f"Of number {index} the colour is",
            "choices": [names[(index * step + step) % 5] for step in range(1, 3 + index % 2)],
            "gold": index % 2,
        }
        for index in range(ITEMS)
    ]
    (tmp_path / "colours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(tmp_path / f"{name}.yaml") for name in ("colours", "prose", "writing")}


def by_harness(directory: Path, names: list[str], batch_size: int, asking: Asking, data: Path | None = None) -> Any:
    """Return what the harness itself says of the model as transformers opens it."""
    import lm_eval
    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    peer = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device="cpu")
    loaded = asking.load([HarnessTask(name=name) for name in names], data, peer)
    for each in loaded:
        each.task.set_fewshot_seed(FEW_SHOT_SEED)
    asked = {each.name: each.task for each in loaded}
    options = {"apply_chat_template": asking.chat_template, "fewshot_as_multiturn": True}
    return lm_eval.evaluate(lm=peer, task_dict={"tasks": asked}, limit=asking.limit, bootstrap_iters=0, **options)
