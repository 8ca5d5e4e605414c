"""nanoXMoE's models as transformers classes; hugging_face.export copies this file, model.py and routers.py."""

import math
from types import SimpleNamespace

import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, QuestionAnsweringModelOutput, TokenClassifierOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from .model import GPT, Encoder
from .routers import Hash

# Trainer's label smoothing shifts the labels of the classes listed here.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["nanoxmoe"] = "NanoXMoEForCausalLM"
UNSUPPORTED = "inputs_embeds", "position_ids", "past_key_values", "output_attentions"


class NanoXMoEConfig(PretrainedConfig):
    model_type = "nanoxmoe"
    trained = "GPT"  # the class or the kind of fine-tuning that was trained
    constants = {}  # config of the training script, from which model.py builds the model
    tie_word_embeddings = True


class Model(PreTrainedModel):
    config_class = NanoXMoEConfig
    base_model_prefix = "body"
    supports_gradient_checkpointing = _supports_sdpa = True
    _no_split_modules = ["Block", "EncoderLayer", "MoE"]
    _input_embed_layer = "wte"  # of `model`

    def _set_gradient_checkpointing(self, enable=True, **ignored):
        net = self.base_model.model
        if enable and not vars(net).get("gradient_checkpointing"):
            net.recompute_layers()
        for layer in () if enable else net.modules():
            vars(layer).pop("forward", None)
        net.gradient_checkpointing = enable

    def resize_token_embeddings(self, *size, **options):
        embeddings = super().resize_token_embeddings(*size, **options)
        for router in self.modules():
            if isinstance(router, Hash):  # known tokens keep their experts
                router.__init__(None, router.E, V=len(embeddings.weight))
                router.to(self.device)
        return embeddings


class NanoXMoEModel(Model):
    """An encoder or decoder without a head, and without a capacity limit, so that no token depends on other rows."""

    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        kind = GPT if config.trained == "GPT" else Encoder
        self.model = kind(SimpleNamespace(**config.constants), config.vocab_size)
        self.model.bias = None  # lm_head has it
        for moe in self.model.moe_layers:
            moe.capacity_factor = moe.eval_capacity_factor = math.inf
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, output_hidden_states=None, **options):
        for name in UNSUPPORTED:
            if options.get(name) is not None and options[name] is not False:
                raise ValueError(f"nanoXMoE does not support {name}: leave it out, and pass input_ids")
        requested = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        mask, nonpad, states = None, None, [] if requested else None
        if attention_mask is not None and not attention_mask.all():
            mask = attention_mask.bool()
            mask = mask | ~mask.any(dim=1, keepdim=True)  # a row of padding alone counts as text
            # Move padding to the end of its row, where no token of a decoder attends to it.
            order = mask.int().argsort(dim=1, descending=True, stable=True)
            input_ids = input_ids.gather(1, order)
            nonpad = mask.gather(1, order).flatten().nonzero().squeeze(1)
        h, _ = getattr(self.model, "hidden", self.model)(input_ids, nonpad, states)
        states = [*(states or [])[: self.config.num_hidden_layers], h]
        if mask is not None:
            inverse = order.argsort(dim=1).unsqueeze(2).expand_as(h)
            states = [x.gather(1, inverse) for x in states]
            if self.config.trained == "GPT":  # padding has read its whole row, so nothing may be predicted from it
                states[-1] = states[-1] * mask.unsqueeze(2)
        return BaseModelOutput(states[-1], hidden_states=tuple(states) if requested else None)


class WithHead(Model):
    """Subclasses define the layers of a head, and its `logits` for the last hidden states."""

    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        self.body, self.dropout = NanoXMoEModel(config), nn.Dropout(config.constants["dropout"])
        self.add_layers(config, config.hidden_size)
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, labels=None, output_hidden_states=None, **options):
        body = self.body(input_ids, attention_mask, output_hidden_states, return_dict=True, **options)
        logits, loss = self.logits(body.last_hidden_state), None
        if labels is not None:  # transformers' loss for this class name; for a decoder it shifts the labels
            sizes = {"vocab_size": self.config.vocab_size, "config": self.config, "pooled_logits": logits}
            loss = self.loss_function(logits=logits, labels=labels, **sizes, **options)
        return TokenClassifierOutput(loss, logits, body.hidden_states)


class NanoXMoEForCausalLM(WithHead, GenerationMixin):
    """A decoder without a key-value cache: each new token recomputes the whole context."""

    _tied_weights_keys = {"lm_head.weight": "body.model.wte.weight"}

    def add_layers(self, config, D):
        self.lm_head = nn.Linear(D, config.vocab_size, bias=config.constants["frequency_bias"])

    def logits(self, h):
        return self.lm_head(h)

    def forward(self, input_ids=None, attention_mask=None, labels=None, output_hidden_states=None, **options):
        if labels is not None and attention_mask is not None:  # predict nothing from padding
            labels = labels.masked_fill(F.pad(attention_mask[:, :-1] == 0, (1, 0)), -100)
        return super().forward(input_ids, attention_mask, labels, output_hidden_states, **options)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **ignored):
        context = slice(-self.config.max_position_embeddings, None)
        mask = None if attention_mask is None else attention_mask[:, context]
        return {"input_ids": input_ids[:, context], "attention_mask": mask}


class NanoXMoEForMaskedLM(WithHead):
    _tied_weights_keys = {"lm_head.weight": "body.model.wte.weight"}

    def add_layers(self, config, D):
        self.dense, self.ln_h = nn.Linear(D, D), nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, config.vocab_size)

    def logits(self, h):
        return self.lm_head(self.ln_h(F.gelu(self.dense(h))))


class NanoXMoEForTokenClassification(WithHead):
    """XLM-E's discriminator, which predicts whether a token was replaced, or as in XLM-R a linear layer."""

    def add_layers(self, config, D):
        self.tags_out = nn.Linear(D, config.num_labels)
        if config.trained == "Electra":
            self.dense, self.ln_h = nn.Linear(D, D), nn.LayerNorm(D)

    def logits(self, h):
        if self.config.trained == "Electra":
            h = self.ln_h(F.gelu(self.dense(h)))
        return self.tags_out(self.dropout(h))


class NanoXMoEForSequenceClassification(WithHead):
    def add_layers(self, config, D):
        self.label_dense, self.label_out = nn.Linear(D, D), nn.Linear(D, config.num_labels)

    def logits(self, h):
        h = self.label_dense(self.dropout(h[:, 0])).tanh()  # of <s>
        return self.label_out(self.dropout(h))


class NanoXMoEForQuestionAnswering(WithHead):
    def add_layers(self, config, D):
        self.answer_out = nn.Linear(D, 2)

    def logits(self, h):
        return self.answer_out(h)

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, start_positions=None, end_positions=None, **options):
        output = super().forward(input_ids, attention_mask, return_dict=True, **options)
        start, end = output.logits.unbind(2)
        loss = self.loss_function(start, end, start_positions, end_positions, **options)
        return QuestionAnsweringModelOutput(loss, start, end, output.hidden_states)
