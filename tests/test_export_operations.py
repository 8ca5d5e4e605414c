"""What transformers' documentation shows, with XLM-R and GPT-2 beside our exports of the same weights."""

import copy
import inspect
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from helpers import save_run

from engine import pretrained
from model import GPT, MaskedLM

transformers = pytest.importorskip("transformers")
SIZES = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=500)
SIZES |= dict(max_position_embeddings=34, type_vocab_size=1, layer_norm_eps=1e-5, initializer_range=0.2)
XLMR = SIZES | dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
GPT2 = dict(n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=600, initializer_range=0.2)
GPT2 |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1)
HEADS = {  # theirs -> ours
    "classifier.dense": "label_dense",
    "classifier.out_proj": "label_out",
    "classifier": "tags_out",
    "qa_outputs": "answer_out",
}


class Side(SimpleNamespace):
    """A folder of one side: `theirs` or our export of the same weights."""

    def load(self, auto: str, **options):
        model = getattr(transformers, auto).from_pretrained(self.folder, trust_remote_code=True, **options)
        return model.eval()

    def main(self, **options):
        return self.load("AutoModelForCausalLM" if self.decoder else "AutoModelForMaskedLM", **options)


@pytest.fixture(scope="module", params=["XLM-R", "GPT-2"])
def sides(request, tmp_path_factory, xlmr, bpe) -> list[Side]:
    base, decoder = tmp_path_factory.mktemp("sides"), request.param == "GPT-2"
    torch.manual_seed(0)
    if decoder:
        theirs, kind, tokenizer = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)), GPT, bpe
    else:
        config = transformers.XLMRobertaConfig(**XLMR)
        theirs, kind, tokenizer = transformers.XLMRobertaForMaskedLM(config), MaskedLM, xlmr
    for p in theirs.parameters():  # biases, too
        p.data += 0.1 * torch.randn_like(p)
    theirs.save_pretrained(base / "theirs")
    constants, weights = (saved := pretrained.read(base / "theirs")).constants, saved.weights
    model = kind(SimpleNamespace(**constants), tokenizer.vocab_size)
    save_run(base / "run", pretrained.fill(model, {}, weights, ""), tokenizer)
    pretrained.export(base / "run", base / "ours")
    names = transformers.AutoTokenizer.from_pretrained(base / "ours", trust_remote_code=True)
    return [Side(folder=base / name, decoder=decoder, ours=name == "ours", tokenizer=names)
            for name in ("theirs", "ours")]  # fmt: skip


def encoder(test):
    return pytest.mark.parametrize("sides", ["XLM-R"], indirect=True)(test)


def decoder(test):
    return pytest.mark.parametrize("sides", ["GPT-2"], indirect=True)(test)


def batch_of(side, padding: str) -> dict:
    """Two rows, the second shorter. GPT-2 needs its positions to pad on the left."""
    ids = torch.randint(4, 500, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padding != "none":
        mask[1, slice(4) if padding == "left" else slice(5, None)] = 0
    batch = {"input_ids": ids * mask + (1 - mask), "attention_mask": mask}
    if side.decoder and not side.ours:
        batch["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return batch


def text(x, batch):
    """The rows of x that are not padding."""
    return x[batch["attention_mask"].bool()]


def labelled(batch) -> dict:
    """With labels for most tokens; a decoder must not be trained to predict a row's first word from padding."""
    mask, labels = batch["attention_mask"], batch["input_ids"].clone()
    labels[:, 6] = -100
    first = mask.argmax(dim=1)
    labels[mask == 0] = -100
    labels[torch.arange(2), first] = torch.where(first > 0, -100, labels[torch.arange(2), first])
    return batch | {"labels": labels}


def logits(side, padding):
    batch = batch_of(side, padding)
    return text(side.main()(**batch).logits, batch)


def hidden_states(side, padding):
    batch = batch_of(side, padding)
    return [text(x, batch) for x in side.load("AutoModel")(**batch, output_hidden_states=True).hidden_states]


def last_hidden_state(side, padding):
    batch = batch_of(side, padding)
    return text(side.load("AutoModel")(**batch)[0], batch)


def loss(side, padding):
    return side.main()(**labelled(batch_of(side, padding))).loss


def gradients(side, padding, checkpointing=False):
    model = side.main().train()
    if checkpointing:
        model.activation_checkpointing_enable()
        model.activation_checkpointing_disable()
        model.activation_checkpointing_enable()
    calls = Counter()
    for norm in [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]:
        norm.register_forward_hook(lambda module, *rest: calls.update([module]))
    model(**labelled(batch_of(side, padding))).loss.backward()
    assert max(calls.values()) == 1 + checkpointing
    return model.get_input_embeddings().weight.grad


def checkpointed_gradients(side, padding):
    return gradients(side, padding, checkpointing=True)


def after_a_round_trip(side, padding, tmp_path):
    side.main().save_pretrained(tmp_path)
    return logits(Side(**vars(side) | {"folder": tmp_path}), padding)


def as_a_tuple(side, padding):
    return side.main()(**labelled(batch_of(side, padding)), return_dict=False)[0]


def with_more_tokens(side, padding, tmp_path, **options):
    """Known tokens keep their logits, also when the model is saved and loaded."""
    model, batch = side.main(), batch_of(side, padding)
    V = model.config.vocab_size
    model.resize_token_embeddings(V + 3, **options)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) >= V + 3
    model.save_pretrained(tmp_path)
    new = batch | {"input_ids": batch["input_ids"].index_fill(1, torch.tensor([8]), V + 2)}
    again = Side(**vars(side) | {"folder": tmp_path}).main()
    assert torch.equal(again(**new).logits, model(**new).logits)
    again(**new, labels=new["input_ids"]).loss.backward()
    return text(model(**batch).logits, batch)[:, :V]


def with_tokens_in_multiples(side, padding, tmp_path):
    return with_more_tokens(side, padding, tmp_path, pad_to_multiple_of=64)


def with_fewer_tokens(side, padding):
    model, batch = side.main(), batch_of(side, padding)
    model.resize_token_embeddings(500)
    return text(model(**batch).logits, batch)


def with_sdpa(side, padding):
    batch = batch_of(side, padding)
    return text(side.main(attn_implementation="sdpa")(**batch).logits, batch)


def copied(side, padding):
    batch = batch_of(side, padding)
    return text(copy.deepcopy(side.main())(**batch).logits, batch)


def with_weights_of_another_name(side, padding):
    """A state dict loads into a model made from the config alone."""
    batch, model = batch_of(side, padding), side.main()
    kind = transformers.AutoModelForCausalLM if side.decoder else transformers.AutoModelForMaskedLM
    new = kind.from_config(model.config, trust_remote_code=True).eval()
    new.load_state_dict(model.state_dict())
    return text(new(**batch).logits, batch)


OPERATIONS = [logits, hidden_states, last_hidden_state, loss, gradients, checkpointed_gradients, after_a_round_trip]
OPERATIONS += [as_a_tuple, with_more_tokens, with_tokens_in_multiples, with_fewer_tokens, with_sdpa, copied]
OPERATIONS += [with_weights_of_another_name]


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_an_operation_gives_what_their_model_gives(sides, operation, padding, tmp_path):
    results = []
    for name, side in zip("ab", sides):
        more = {"tmp_path": tmp_path / name} if "tmp_path" in inspect.signature(operation).parameters else {}
        results.append(operation(side, padding, **more))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_as_close_as_theirs(sides, dtype, autocast):
    results = []
    for side in sides:
        batch, exact = labelled(batch_of(side, "right")), side.main()
        model = side.main(dtype=getattr(torch, dtype))
        assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
        with torch.autocast("cpu", getattr(torch, dtype), enabled=autocast):
            output = model(**batch)
        output.loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        results.append((output.loss - exact(**batch).loss).abs().item())
    assert results[1] < 2 * results[0] + 0.05


@pytest.mark.parametrize("auto", ["main", "AutoModel"])
def test_a_row_of_padding_alone_changes_no_other_row_and_is_finite(sides, auto):
    for side in sides:
        model = (side.main() if auto == "main" else side.load(auto)).train()
        batch = batch_of(side, "none")
        alone = model(batch["input_ids"][:1])[0]
        batch["attention_mask"][1] = 0
        output = model(**batch)[0]
        torch.testing.assert_close(output[:1], alone, rtol=1e-4, atol=1e-5)
        output.float().square().mean().backward()
        assert output.isfinite().all()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_what_is_not_supported_is_refused_in_one_line(sides):
    _, ours = sides
    model, batch = ours.main(), batch_of(ours, "none")
    embeds = model.get_input_embeddings()(batch["input_ids"])
    for name, x in {"inputs_embeds": embeds, "position_ids": batch["input_ids"], "output_attentions": True}.items():
        with pytest.raises(ValueError, match=f"^nanoXMoE does not support {name}: .*$"):
            model(**batch | {name: x})
    model(**batch, inputs_embeds=None, output_attentions=False, token_type_ids=torch.zeros_like(batch["input_ids"]))


# ---------------------------------------------------------------------------------------------------------------------
# Decoders


@decoder
def test_nothing_is_predicted_from_padding(sides):
    """With labels at every word, a batch has the loss of its rows alone, on either side."""
    _, ours = sides
    model = ours.main()
    for padding in ("left", "right"):
        batch = batch_of(ours, padding)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        rows = [row[mask.bool()][None] for row, mask in zip(batch["input_ids"], batch["attention_mask"])]
        losses = [model(row, labels=row).loss * (row.numel() - 1) for row in rows]
        alone = sum(losses) / sum(row.numel() - 1 for row in rows)
        torch.testing.assert_close(model(**batch, labels=labels).loss, alone, rtol=1e-4, atol=1e-5)
        other = batch | {"input_ids": batch["input_ids"].index_fill(1, torch.tensor([4, 8]), 7)}
        padded = batch["attention_mask"] == 0
        assert torch.equal(model(**batch).logits[padded], model(**other).logits[padded])


GENERATIONS = {
    "greedy": {},
    "beams": dict(num_beams=3, num_return_sequences=2),
    "samples": dict(do_sample=True, top_k=5, temperature=0.7, num_return_sequences=2),
    "nucleus": dict(do_sample=True, top_p=0.8),
    "penalties": dict(repetition_penalty=1.5, no_repeat_ngram_size=2, min_new_tokens=3),
    "cache": dict(use_cache=True),
    "scores": dict(output_scores=True, return_dict_in_generate=True),
}


@decoder
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", GENERATIONS)
def test_generation_gives_their_tokens(sides, name, padding):
    tokens = []
    for side in sides:
        batch = batch_of(side, padding)
        batch.pop("position_ids", None)  # generate computes them
        torch.manual_seed(0)
        output = side.main().generate(**batch, max_new_tokens=6, pad_token_id=1, eos_token_id=None,
                                      **dict(do_sample=False) | GENERATIONS[name])  # fmt: skip
        tokens.append(output if torch.is_tensor(output) else output.sequences)
    assert torch.equal(*tokens)


# ---------------------------------------------------------------------------------------------------------------------
# Trainer


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_trainer_logs_their_losses(sides, smoothing, tmp_path):
    pytest.importorskip("accelerate")
    logged = []
    for side in sides:
        rows = [{"input_ids": [*range(5 + i, 12 + i + i % 3)]} for i in range(12)]
        for row in rows:
            row["labels"], row["attention_mask"] = row["input_ids"], [1] * len(row["input_ids"])
        tokenizer = copy.deepcopy(side.tokenizer)
        tokenizer.padding_side = "right"
        collate = transformers.DataCollatorForTokenClassification(tokenizer)
        settings = dict(max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, use_cpu=True)
        settings |= dict(
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            activation_checkpointing=True,
            label_smoothing_factor=smoothing,
            seed=1,
        )
        args = transformers.TrainingArguments(str(tmp_path / "out"), **settings)
        model = side.main()
        if side.decoder:
            model.loss_type = "ForCausalLM"  # GPT-2's own is unknown to Trainer, which then counts too many labels
        trainer = transformers.Trainer(model, args, collate, rows, eval_dataset=rows)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        logged.append([*losses, trainer.evaluate()["eval_loss"]])
    assert len(logged[0]) == 4
    assert logged[1] == pytest.approx(logged[0], rel=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Heads of encoders


def with_head(sides, auto: str, **options):
    """Both models with the same new head."""
    theirs, ours = (side.load(auto, **options) for side in sides)
    for name, p in theirs.named_parameters():
        module, _, suffix = name.rpartition(".")
        if module in HEADS:
            p.data += 0.1 * torch.randn_like(p)
            ours.get_parameter(f"{HEADS[module]}.{suffix}").data.copy_(p.data)
    return theirs, ours


LABELS = {
    "sentences": ("SequenceClassification", dict(num_labels=3), {"labels": torch.tensor([2, 0])}),
    "regression": ("SequenceClassification", dict(num_labels=1), {"labels": torch.tensor([0.5, -1.0])}),
    "several labels": ("SequenceClassification", dict(num_labels=3, problem_type="multi_label_classification"),
                       {"labels": torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])}),
    "tags": ("TokenClassification", dict(num_labels=4), {"labels": torch.arange(18).view(2, 9) % 4}),
    "unknown tags": ("TokenClassification", dict(num_labels=4), {"labels": torch.tensor([[-100] * 5 + [3] * 4] * 2)}),
    "answers": ("QuestionAnswering", {},
                {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 2])}),
    "answers outside": ("QuestionAnswering", {},
                        {"start_positions": torch.tensor([1, 99]), "end_positions": torch.tensor([3, 99])}),
}  # fmt: skip


@encoder
@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("name", LABELS)
def test_heads_compute_what_theirs_do(sides, name, padding, tmp_path):
    kind, options, labels = LABELS[name]
    models, outputs = with_head(sides, f"AutoModelFor{kind}", **options), []
    for model in models:
        batch = batch_of(sides[1], padding)
        assert model(**batch).loss is None
        outputs.append(model(**batch, **labels))
        outputs[-1].loss.backward()
    assert list(outputs[0]) == list(outputs[1])
    torch.testing.assert_close(dict(outputs[1]), dict(outputs[0]), rtol=1e-4, atol=1e-5)
    grads = [model.get_input_embeddings().weight.grad for model in models]
    grads[1][1] = 0  # of <pad>, which theirs does not train
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-5)
    models[1].save_pretrained(tmp_path)
    again = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(tmp_path, trust_remote_code=True)
    assert torch.equal(again.eval()(**batch)[0], models[1](**batch)[0])


PIPELINES = {
    "text-classification": ("SequenceClassification", "def one"),
    "token-classification": ("TokenClassification", "def one"),
    "fill-mask": ("MaskedLM", "def <mask> one"),
    "feature-extraction": ("", "def one"),
}


@encoder
@pytest.mark.parametrize("task", PIPELINES)
def test_pipelines_give_what_theirs_do(sides, task):
    kind, words = PIPELINES[task]
    models = with_head(sides, f"AutoModelFor{kind}" if kind else "AutoModel")
    theirs, ours = (transformers.pipeline(task, model=model, tokenizer=sides[1].tokenizer)(words) for model in models)
    if task == "feature-extraction":
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-5)
    else:
        assert [row.pop("score") for row in ours] == pytest.approx([row.pop("score") for row in theirs], rel=1e-3)
        assert ours == theirs
