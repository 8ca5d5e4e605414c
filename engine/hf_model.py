"""nanoXMoE's models as transformers classes; hugging_face.export copies this file, model.py and routers.py."""

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
    constants = {}  # config of the training script, from which model.py builds the model


class Model(PreTrainedModel):
    config_class = NanoXMoEConfig
    base_model_prefix = "model"
    _input_embed_layer = "wte"  # transformers looks up this attribute of `model` or `embeddings`

    def states(self, requested: bool | None) -> list | None:
        """An empty list to collect hidden states in; None unless the call, or else the config, requests them."""
        requested = self.config.output_hidden_states if requested is None else requested
        return [] if requested else None

    def loss(self, logits, labels, options: dict):
        """Calls transformers' loss for this class name. For a decoder it shifts the labels; -100 is ignored."""
        if labels is None:
            return None
        sizes = {"vocab_size": self.config.vocab_size, "config": self.config}
        return self.loss_function(logits=logits, labels=labels, **sizes, **options)


def network(kind: type[SparseModel], config: NanoXMoEConfig) -> SparseModel:
    """Builds a model of model.py without a capacity limit, so that no token depends on the rest of its batch."""
    net = kind(SimpleNamespace(**config.constants), config.vocab_size)
    for moe in net.moe_layers:
        moe.capacity_factor = moe.eval_capacity_factor = math.inf
    return net


def nonpad_indices(attention_mask) -> torch.Tensor | None:
    """(B, T), 0 for padding -> flat indices of non-padding tokens; None if there is no padding."""
    if attention_mask is None or attention_mask.all():
        return None
    return attention_mask.flatten().nonzero().squeeze(1)


class NanoXMoEForCausalLM(Model, GenerationMixin):
    """A decoder without a key-value cache: each new token recomputes the whole context."""

    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        self.model = network(GPT, config)
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids, attention_mask=None, labels=None, output_hidden_states=None, **options):
        states, padded = self.states(output_hidden_states), nonpad_indices(attention_mask) is not None
        if padded:  # move padding to the end of its row, where no token attends to it
            order = attention_mask.argsort(dim=1, descending=True, stable=True)
            input_ids = input_ids.gather(1, order)
            attention_mask = attention_mask.gather(1, order)
        h, _ = self.model.hidden(input_ids, nonpad=nonpad_indices(attention_mask), states=states)
        if padded:
            inverse = order.argsort(dim=1).unsqueeze(2).expand_as(h)
            h, states = h.gather(1, inverse), states and [x.gather(1, inverse) for x in states]
        logits = output_logits(h, self.model.wte.weight, self.model.bias)
        return CausalLMOutput(self.loss(logits, labels, options), logits, hidden_states=states and (*states, h))

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **ignored):
        context = slice(-self.config.max_position_embeddings, None)
        mask = None if attention_mask is None else attention_mask[:, context]
        return {"input_ids": input_ids[:, context], "attention_mask": mask}


class NanoXMoEModel(Model):
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
        h, _ = self.encoder(input_ids, nonpad_indices(attention_mask), states)
        return BaseModelOutput(h, hidden_states=states and tuple(states))


class WithHead(Model):
    """An encoder with a head: a dense layer, and an output layer `out` that each subclass defines."""

    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        D = config.hidden_size
        self.model, self.dense, self.ln_h = NanoXMoEModel(config), nn.Linear(D, D), nn.LayerNorm(D)

    @can_return_tuple
    def forward(self, input_ids, attention_mask=None, labels=None, output_hidden_states=None, **options):
        encoded = self.model(input_ids, attention_mask, output_hidden_states, return_dict=True)
        logits = self.out(self.ln_h(F.gelu(self.dense(encoded.last_hidden_state))))
        return TokenClassifierOutput(self.loss(logits, labels, options), logits, encoded.hidden_states)


class NanoXMoEForMaskedLM(WithHead):
    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.post_init()

    def out(self, x):
        return output_logits(x, self.get_input_embeddings().weight, self.bias)


class NanoXMoEForTokenClassification(WithHead):
    """XLM-E's discriminator, which predicts whether a token was replaced; fine-tuning can give it other labels."""

    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        self.out = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()
