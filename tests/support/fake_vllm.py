"""What stands in for the library vLLM: so much of it as a worker uses, computed by plain transformers."""

from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class SamplingParams:
    def __init__(self, **fields):
        known = {"temperature", "max_tokens", "prompt_logprobs", "detokenize", "stop"}
        assert fields.keys() <= known
        assert fields["temperature"] == 0
        self.__dict__ |= {"prompt_logprobs": None, "stop": []} | fields


class LLM:
    def __init__(self, *, model, max_model_len, **options):
        assert options["logprobs_mode"] == "raw_logprobs"
        assert options["max_logprobs"] >= 1
        self.longest, dtype = max_model_len, torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype, quantization=None))

    def generate(self, prompts, wanted, use_tqdm):
        assert len(prompts) == len(wanted)
        return [self._answer(each["prompt_token_ids"], how) for each, how in zip(prompts, wanted, strict=True)]

    @torch.no_grad()
    def _answer(self, tokens, how):
        if len(tokens) + how.max_tokens > self.longest:
            raise ValueError(f"the prompt is longer than max_model_len {self.longest}")
        read = None
        if how.prompt_logprobs:
            logs = self.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            read = [None] + [
                {token: SimpleNamespace(logprob=float(row[token])) for token in (int(row.argmax()), following)}
                for row, following in zip(logs, tokens[1:], strict=False)
            ]
        written = []
        while len(written) < how.max_tokens:
            logits = self.model(torch.tensor([tokens + written])).logits[0, -1]
            written.append(int(logits.argmax()))
            text = self.tokenizer.decode(written)
            if written[-1] == self.tokenizer.eos_token_id or any(stop in text for stop in how.stop):
                break
        return SimpleNamespace(prompt_logprobs=read, outputs=[SimpleNamespace(token_ids=written)])
