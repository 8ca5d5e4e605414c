"""nanoXMoE's models under the names that transformers expects.

`python -m engine.pretrained export RUN FOLDER` copies this file into FOLDER, with model.py and routers.py beside it;
transformers runs it where it is told trust_remote_code=True.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput, TokenClassifierOutput
from transformers.utils import can_return_tuple

from .model import GPT, Encoder, SparseModel, output_logits


class NanoXMoEConfig(PretrainedConfig):
    model_type = "nanoxmoe"
    constants = {}  # of the training script, by which model.py makes the model


class Model(PreTrainedModel):
    """What all have."""

    config_class = NanoXMoEConfig
    base_model_prefix = "model"
    _input_embed_layer = "wte"  # by this name transformers looks for the embeddings in `model` and `embeddings`

    def states(self, asked: bool | None) -> list | None:
        """What hidden states are to be put into, None where neither the call nor the config asks for them."""
        asked = self.config.output_hidden_states if asked is None else asked
        return [] if asked else None

    def loss(self, logits, labels, options: dict):
        """By transformers' function for a class of this name: a decoder's shifts the labels, and -100 is no label."""
        if labels is None:
            return None
        sizes = {"vocab_size": self.config.vocab_size, "config": self.config}
        return self.loss_function(logits=logits, labels=labels, **sizes, **options)


def network(kind: type[SparseModel], config: NanoXMoEConfig) -> SparseModel:
    """A model of model.py whose experts have no limit, so that no token depends on its batch-mates."""
    net = kind(SimpleNamespace(**config.constants), config.vocab_size)
    for moe in net.moe_layers:
        moe.capacity_factor = moe.eval_capacity_factor = math.inf
    return net


def places(attention_mask) -> torch.Tensor | None:
    """(B, T), 0 for padding -> places in B * T of what is none, or None where all is."""
    if attention_mask is None or attention_mask.all():
        return None
    return attention_mask.flatten().nonzero().squeeze(1)


class NanoXMoEForCausalLM(Model, GenerationMixin):
    """A decoder. It keeps no keys and values: for each new token it reads again what stands before."""

    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        self.model = network(GPT, config)
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids, attention_mask=None, labels=None, output_hidden_states=None, **options):
        states, padded = self.states(output_hidden_states), places(attention_mask) is not None
        if padded:  # padding goes to the end of its row, where no token sees it
            order = attention_mask.argsort(dim=1, descending=True, stable=True)
            input_ids = input_ids.gather(1, order)
            attention_mask = attention_mask.gather(1, order)
        h, _ = self.model.hidden(input_ids, real=places(attention_mask), states=states)
        if padded:
            back = order.argsort(dim=1).unsqueeze(2).expand_as(h)
            h, states = h.gather(1, back), states and [x.gather(1, back) for x in states]
        logits = output_logits(h, self.model.wte.weight, self.model.bias)
        return CausalLMOutput(self.loss(logits, labels, options), logits, hidden_states=states and (*states, h))

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **ignored):
        read = slice(-self.config.max_position_embeddings, None)
        mask = None if attention_mask is None else attention_mask[:, read]
        return {"input_ids": input_ids[:, read], "attention_mask": mask}


class NanoXMoEModel(Model):
    """An encoder's hidden states."""

    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        self.encoder = network(Encoder, config)
        self.post_init()

    @property
    def embeddings(self) -> Encoder:
        return self.encoder

    @can_return_tuple
    def forward(self, input_ids, attention_mask=None, output_hidden_states=None, **ignored):
        states = self.states(output_hidden_states)
        h, _ = self.encoder(input_ids, places(attention_mask), states)
        return BaseModelOutput(h, hidden_states=states and tuple(states))


class WithHead(Model):
    """An encoder with a head, which begins with the same layer for all."""

    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        D = config.hidden_size
        self.model, self.dense, self.ln_h = NanoXMoEModel(config), nn.Linear(D, D), nn.LayerNorm(D)

    @can_return_tuple
    def forward(self, input_ids, attention_mask=None, labels=None, output_hidden_states=None, **options):
        read = self.model(input_ids, attention_mask, output_hidden_states, return_dict=True)
        logits = self.out(self.ln_h(F.gelu(self.dense(read.last_hidden_state))))
        return TokenClassifierOutput(self.loss(logits, labels, options), logits, read.hidden_states)


class NanoXMoEForMaskedLM(WithHead):
    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.post_init()

    def out(self, x):
        return output_logits(x, self.get_input_embeddings().weight, self.bias)


class NanoXMoEForTokenClassification(WithHead):
    """As exported from XLM-E's discriminator, it says whether a token was replaced; it can be trained to say more."""

    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        self.out = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()
