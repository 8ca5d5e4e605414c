"""nanoXMoE's models as transformers classes; hugging_face.export copies this file, model.py and routers.py."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, QuestionAnsweringModelOutput, TokenClassifierOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from .model import GPT, Encoder, SparseModel, output_logits
from .routers import Hash

UNSUPPORTED = "inputs_embeds", "position_ids", "past_key_values", "output_attentions"
# Trainer's label smoothing shifts the labels of classes that are listed here.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["nanoxmoe"] = "NanoXMoEForCausalLM"


class NanoXMoEConfig(PretrainedConfig):
    model_type = "nanoxmoe"
    trained = "GPT"  # the class or the kind of task that was trained
    constants = {}  # config of the training script, from which model.py builds the model
    tie_word_embeddings = True


class Model(PreTrainedModel):
    config_class = NanoXMoEConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Block", "EncoderLayer", "MoE"]
    _input_embed_layer = "wte"  # transformers looks up this attribute of `model` or `embeddings`

    def _set_gradient_checkpointing(self, enable=True, **ignored):
        [net] = [module for module in self.modules() if isinstance(module, SparseModel)]
        for layer in net.modules():
            if getattr(vars(layer).get("forward"), "func", None) is checkpoint:
                del layer.forward
        if enable:
            net.recompute_layers()
        net.gradient_checkpointing = enable

    def resize_token_embeddings(self, *size, **options):
        embeddings = super().resize_token_embeddings(*size, **options)
        for router in self.modules():
            if isinstance(router, Hash):
                experts = torch.arange(len(embeddings.weight), device=self.device) % router.E
                known = router.expert_of_id[: len(experts)]
                router.expert_of_id = torch.cat([known, experts[len(known) :]])
        return embeddings


def visible(attention_mask) -> torch.Tensor | None:
    """(B, T), 0 for padding -> bool, None if there is no padding. As in XLM-R, a row of padding alone is read."""
    if attention_mask is None or attention_mask.all():
        return None
    mask = attention_mask.bool()
    return mask | ~mask.any(dim=1, keepdim=True)


class NanoXMoEModel(Model):
    """An encoder, or a decoder without its output layer. No token depends on other rows: there is no capacity limit."""

    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        self.is_decoder = config.trained == "GPT"
        self.net = (GPT if self.is_decoder else Encoder)(SimpleNamespace(**config.constants), config.vocab_size)
        self.net.bias = None  # in lm_head
        for moe in self.net.moe_layers:
            moe.capacity_factor = moe.eval_capacity_factor = math.inf
        self.post_init()

    @property
    def embeddings(self) -> SparseModel:
        return self.net

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, output_hidden_states=None, **options):
        for name in UNSUPPORTED:
            if options.get(name) is not None and options[name] is not False:
                raise ValueError(f"nanoXMoE does not support {name}: pass input_ids and attention_mask alone")
        requested = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = [] if requested else None
        mask = seen = visible(attention_mask)
        if self.is_decoder and mask is not None:  # move padding to the end of its row, where no token attends to it
            order = mask.int().argsort(dim=1, descending=True, stable=True)
            input_ids, seen = input_ids.gather(1, order), mask.gather(1, order)
        nonpad = None if mask is None else seen.flatten().nonzero().squeeze(1)
        h, _ = (self.net.hidden if self.is_decoder else self.net)(input_ids, nonpad, states)
        if self.is_decoder and requested:
            states.append(h)
        if self.is_decoder and mask is not None:
            inverse = order.argsort(dim=1).unsqueeze(2).expand_as(h)
            h, states = h.gather(1, inverse), states and [x.gather(1, inverse) for x in states]
            h = h * mask.unsqueeze(2)  # padding has read its row, so nothing may be predicted from it
        return BaseModelOutput(h, hidden_states=states and tuple(states))


class WithHead(Model):
    """A model with a head: subclasses define its layers, and `logits` of the last hidden states."""

    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        self.model, self.dropout = NanoXMoEModel(config), nn.Dropout(config.constants["dropout"])

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, labels=None, output_hidden_states=None, **options):
        body = self.model(input_ids, attention_mask, output_hidden_states, return_dict=True, **options)
        logits, loss = self.logits(body.last_hidden_state), None
        if labels is not None:  # transformers' loss for this class name; for a decoder it shifts the labels
            options |= {"pooled_logits": logits, "vocab_size": logits.shape[-1], "config": self.config}
            loss = self.loss_function(logits=logits, labels=labels, **options)
        return TokenClassifierOutput(loss, logits, body.hidden_states)


class WithVocabulary(WithHead):
    """With an output matrix that is tied to the embeddings."""

    _tied_weights_keys = {"lm_head.weight": "model.net.wte.weight"}

    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        bias = config.constants.get("frequency_bias", True)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias)
        self.post_init()

    def logits(self, h):
        return output_logits(h, self.lm_head.weight, self.lm_head.bias)


class NanoXMoEForCausalLM(WithVocabulary, GenerationMixin):
    """A decoder without a key-value cache: each new token recomputes the whole context."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, output_hidden_states=None, **options):
        if labels is not None and attention_mask is not None:  # predict nothing from padding
            after_padding = F.pad(attention_mask[:, :-1] == 0, (1, 0))
            labels = labels.masked_fill(after_padding, -100)
        return super().forward(input_ids, attention_mask, labels, output_hidden_states, **options)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **ignored):
        context = slice(-self.config.max_position_embeddings, None)
        mask = None if attention_mask is None else attention_mask[:, context]
        return {"input_ids": input_ids[:, context], "attention_mask": mask}


class WithDense(WithHead):
    """With the dense layer of the pre-training heads of encoders."""

    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        D = config.hidden_size
        self.dense, self.ln_h = nn.Linear(D, D), nn.LayerNorm(D)
        self.post_init()

    def logits(self, h):
        return super().logits(self.ln_h(F.gelu(self.dense(h))))


class NanoXMoEForMaskedLM(WithDense, WithVocabulary):
    pass


class NanoXMoEForTokenClassification(WithHead):
    """As XLM-R's, and as finetune_xtreme.py's, like the next two."""

    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        self.tags_out = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def logits(self, h):
        return self.tags_out(self.dropout(h))


class NanoXMoEDiscriminatorForTokenClassification(WithDense, NanoXMoEForTokenClassification):
    """XLM-E's discriminator, which predicts whether a token was replaced; fine-tuning can give it other labels."""


class NanoXMoEForSequenceClassification(WithHead):
    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        D = config.hidden_size
        self.label_dense, self.label_out = nn.Linear(D, D), nn.Linear(D, config.num_labels)
        self.post_init()

    def logits(self, h):
        h = self.label_dense(self.dropout(h[:, 0])).tanh()  # of <s>
        return self.label_out(self.dropout(h))


class NanoXMoEForQuestionAnswering(WithHead):
    def __init__(self, config: NanoXMoEConfig):
        super().__init__(config)
        self.answer_out = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def logits(self, h):
        return self.answer_out(h)

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, start_positions=None, end_positions=None, **options):
        output = super().forward(input_ids, attention_mask, return_dict=True, **options)
        logits, mask = output.logits, visible(attention_mask)
        if mask is not None:
            logits = logits.masked_fill(~mask.unsqueeze(2), torch.finfo(logits.dtype).min)
        start, end = logits.unbind(2)
        loss = self.loss_function(start, end, start_positions, end_positions, **options)
        return QuestionAnsweringModelOutput(loss, start, end, output.hidden_states)
