"""nanoXMoE's models and tokenizers under the names that transformers expects.

`python -m engine.pretrained export RUN FOLDER` copies this file into FOLDER, with model.py, routers.py and
nanoxmoe_tokenizers.py beside it; transformers runs it where it is told trust_remote_code=True.
"""

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, PreTrainedTokenizer
from transformers.modeling_outputs import CausalLMOutput, MaskedLMOutput, TokenClassifierOutput

from .model import GPT, Encoder, MaskedLM
from .nanoxmoe_tokenizers import KINDS, load_tokenizer


class NanoXMoEConfig(PretrainedConfig):
    """constants: those of the training script, by which model.py makes the model."""

    model_type = "nanoxmoe"

    def __init__(self, constants: dict | None = None, **options):
        self.constants = constants or {}
        super().__init__(**options)


class Model(PreTrainedModel):
    """What all have: a model of model.py, without a capacity limit, so that no token depends on its batch-mates."""

    config_class = NanoXMoEConfig
    kind = Encoder

    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        self.model = self.kind(SimpleNamespace(**config.constants), config.vocab_size)
        self.post_init()

    def run(self, *inputs):
        """What the model returns, but for the balance loss. Experts that choose tokens keep their limit: it chooses."""
        with self.model.no_limit():
            y, _ = self.model(*inputs)
        return y


def places(attention_mask) -> torch.Tensor | None:
    """(B, T), 0 for padding -> places in B * T of what is none, or None where all is."""
    if attention_mask is None or attention_mask.all():
        return None
    return attention_mask.flatten().nonzero().squeeze(1)


class NanoXMoEForCausalLM(Model, GenerationMixin):
    """A decoder, which knows no padding: texts of unlike lengths are read one by one."""

    kind = GPT

    def forward(self, input_ids, attention_mask=None, **ignored):
        if places(attention_mask) is None:
            return CausalLMOutput(logits=self.run(input_ids))
        logits = self.model.wte.weight.new_zeros(*input_ids.shape, self.config.vocab_size)
        for row, ids, real in zip(logits, input_ids, attention_mask.bool()):
            row[real] = self.run(ids[real].unsqueeze(0)).squeeze(0)
        return CausalLMOutput(logits=logits)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **ignored):
        read = slice(-self.config.max_position_embeddings, None)
        mask = None if attention_mask is None else attention_mask[:, read]
        return {"input_ids": input_ids[:, read], "attention_mask": mask}


class NanoXMoEForMaskedLM(Model):
    kind = MaskedLM

    def forward(self, input_ids, attention_mask=None, **ignored):
        everywhere = torch.arange(input_ids.numel(), device=input_ids.device)
        logits = self.run(input_ids, everywhere, places(attention_mask))
        return MaskedLMOutput(logits=logits.view(*input_ids.shape, -1))


class NanoXMoEForTokenClassification(Model):
    """XLM-E's discriminator: a logit for each token, above 0 where it seems replaced."""

    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        D = config.hidden_size
        self.dense, self.ln_h = nn.Linear(D, D), nn.LayerNorm(D)
        self.out = nn.Linear(D, 1)

    def forward(self, input_ids, attention_mask=None, **ignored):
        h = self.run(input_ids, places(attention_mask))
        h = self.ln_h(F.gelu(self.dense(h)))
        return TokenClassifierOutput(logits=self.out(h))


class NanoXMoETokenizer(PreTrainedTokenizer):
    """A tokenizer of nanoxmoe_tokenizers.py, whose tokens are called by their numbers."""

    vocab_files_names = {kind: each.filename for kind, each in KINDS.items()}  # a folder has one of them
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, **options):
        (file,) = filter(None, (options.pop(kind, None) for kind in KINDS))
        self.ours = load_tokenizer(file)
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return self.ours.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {f"<{i}>": i for i in range(self.vocab_size)} | self.added_tokens_encoder

    def tokenize(self, text: str, **ignored) -> list[str]:
        [ids] = self.ours.encode_batch([text])
        return list(map(self._convert_id_to_token, ids))

    def _convert_token_to_id(self, token: str) -> int:
        return int(token[1:-1])

    def _convert_id_to_token(self, i: int) -> str:
        return f"<{i}>"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self.ours.decode(list(map(self._convert_token_to_id, tokens)))

    def save_vocabulary(self, folder: str, prefix: str | None = None) -> tuple[str]:
        return (str(self.ours.save(Path(folder))),)
