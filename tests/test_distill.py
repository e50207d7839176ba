"""Teaching the indexers: the loss against a slow reference, the pattern of a model, documents, and the two stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from indexshare import distill
from indexshare.attention import install
from indexshare.pattern import EVERYTHING, adopt, adopt_anew, indexers, overlap, selecting, trying
from indexshare.schedule import Schedule
from rl.config import ConfigError

TOPK = 8


def tiny(pattern: str = "FFSSSF", dtype: torch.dtype = torch.float64) -> GlmMoeDsaForCausalLM:
    torch.manual_seed(0)
    config = GlmMoeDsaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=len(pattern),
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, kv_lora_rank=16,
        q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10, first_k_dense_replace=1,
        index_topk=TOPK, index_head_dim=16, index_n_heads=2, max_position_embeddings=512, pad_token_id=0,
        initializer_range=0.2, **Schedule.from_pattern(pattern).config_fields(),
    )  # fmt: skip
    model = GlmMoeDsaForCausalLM(config)
    model.config._experts_implementation = "eager"
    return install(model.to(dtype).eval())


def packed(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(1, 50, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return ids, positions, torch.arange(sum(lengths)) - positions


def gradients(model: GlmMoeDsaForCausalLM) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert torch.allclose(got[name], gradient, rtol=1e-8, atol=1e-13), name


# ------------------------------------------------------------------------------------------------ the loss
def whole_scores(model: GlmMoeDsaForCausalLM, inputs: list[distill.LayerInput], full: int) -> Tensor:
    """Index scores [tokens, tokens] in one piece: sum over heads of weight * relu(q k / sqrt(dim))."""
    q, k, w = distill.projected(model.model.layers[full].self_attn, inputs[full])
    return (torch.einsum("qhd,kd->qhk", q, k) * q.shape[-1] ** -0.5).relu().mul(w[..., None]).sum(1)


def slow(
    model: GlmMoeDsaForCausalLM, inputs: list[distill.LayerInput], starts: Tensor, layers: dict[int, list[int]], k: int
) -> Tensor:
    """Query by query, over the k keys with the highest scores: the mean over queries of the mean over `layers` of
    KL(mean over heads of the layer's attention || softmax of the scores)."""
    total = torch.zeros((), dtype=torch.float64)
    for full, taught in layers.items():
        scores = whole_scores(model, inputs, full)
        for i in taught:
            s = distill.served(model.model.layers[i].self_attn, inputs[i])
            logits = s.q @ s.k.transpose(1, 2) * s.scale
            for t in range(len(starts)):
                legal = range(int(starts[t]), t + 1)
                keys = sorted(legal, key=lambda j: (-scores[t, j].item(), j))[:k]
                p = logits[:, t, keys].softmax(-1).mean(0)
                total = total + (p * (p.log() - scores[t, keys].log_softmax(-1))).sum() / len(taught) / len(starts)
    return total


@pytest.mark.parametrize("support", ["all", "selected"])
@pytest.mark.parametrize("teachers", ["served", "own"])
def test_proposition_1_one_kl_to_the_mean_has_the_gradient_of_the_mean_of_kls(support, teachers) -> None:
    model = tiny()
    ids, positions, starts = packed([45, 20])
    inputs = distill.record(model, ids, positions, starts)
    served = Schedule.from_config(model.config).served_layers()
    layers = {full: list(taught) if teachers == "served" else [full] for full, taught in served.items()}
    mean_of_kls = slow(model, inputs, starts, layers, TOPK if support == "selected" else 1000)
    mean_of_kls.backward()
    want = gradients(model)

    found = distill.losses(model, inputs, starts, support=support, teachers=teachers, chunk_size=16)
    kl_to_mean = sum(found.values())
    kl_to_mean.backward()
    assert_equal(gradients(model), want)
    # The values differ by the diversity of the teachers, which no indexer can change; without diversity they do not.
    assert (kl_to_mean < mean_of_kls - 1e-3) if teachers == "served" else torch.allclose(kl_to_mean, mean_of_kls)


def test_the_gradient_scales_with_what_the_loss_is_part_of_and_adds_up_over_micro_batches() -> None:
    model = tiny()
    ids, positions, starts = packed([30, 26])
    weights = torch.rand(56, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    inputs = distill.record(model, ids, positions, starts)
    sum(distill.losses(model, inputs, starts, weights=weights).values()).backward()
    want = {name: 3 * gradient for name, gradient in gradients(model).items()}
    for part in (slice(0, 30), slice(30, 56)):
        zero = starts[part] - starts[part][0]
        inputs = distill.record(model, ids[part], positions[part], zero)
        (3 * sum(distill.losses(model, inputs, zero, weights=weights[part]).values())).backward()
    got = gradients(model)
    for name, gradient in want.items():  # routers compute in float32
        assert torch.allclose(got[name], gradient, rtol=1e-4, atol=1e-6 * gradient.abs().max()), name


def test_queries_without_weight_teach_nothing() -> None:
    model = tiny()
    ids, positions, starts = packed([40])
    found = distill.losses(model, distill.record(model, ids, positions, starts), starts, weights=torch.zeros(40))
    torch.autograd.backward(list(found.values()))
    assert all(loss == 0 for loss in found.values())
    assert all((gradient == 0).all() for gradient in gradients(model).values())


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_nothing_of_the_size_of_all_queries_by_all_keys_ever_exists() -> None:
    model = tiny("FSS", torch.float32)
    tokens, chunk = 1024, 32
    ids, positions, starts = packed([tokens])
    inputs = distill.record(model, ids, positions, starts)
    with Largest() as largest:
        for support in ("all", "selected"):
            losses = distill.losses(model, inputs, starts, chunk_size=chunk, support=support)
            torch.autograd.backward(list(losses.values()))
        distill.recall(model, inputs, starts, TOPK, chunk_size=chunk)
        overlap(model, inputs, starts, TOPK, chunk_size=chunk)
    # Projections are [tokens, heads, dim]; one chunk's attention is [chunk, tokens] for a layer, [3, ...] for all.
    assert largest.elements <= max(3 * chunk * tokens, tokens * 48 * 2)
    assert largest.elements < tokens * tokens / 8


def test_beside_a_language_loss_each_gradient_stays_what_it_is_alone() -> None:
    model = tiny()
    ids, positions, starts = packed([40, 20])

    def language() -> tuple[Tensor, list[distill.LayerInput]]:
        with distill.recording(model) as inputs:
            hidden = distill.hidden_states(model, ids, positions, starts)
        return hidden.square().mean(), inputs

    language()[0].backward()
    backbone = gradients(model)
    sum(distill.losses(model, language()[1], starts).values()).backward()
    indexer = gradients(model)
    assert not backbone.keys() & indexer.keys()
    loss, inputs = language()
    (loss + sum(distill.losses(model, inputs, starts).values())).backward()
    assert_equal(gradients(model), backbone | indexer)


def test_checkpointed_layers_are_recorded_once() -> None:
    model = tiny().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids, positions, starts = packed([40])
    with distill.recording(model) as inputs:
        hidden = distill.hidden_states(model, ids, positions, starts)
    hidden.sum().backward()
    assert len(inputs) == 6
    plain = distill.record(tiny(), ids, positions, starts)
    assert all(torch.equal(a.hidden, b.hidden) for a, b in zip(inputs, plain, strict=True))


def test_recall_is_the_share_of_the_best_attention_mass_that_the_selection_has() -> None:
    model = tiny("FS")
    ids, positions, starts = packed([30, 5])
    inputs = distill.record(model, ids, positions, starts)
    scores = whole_scores(model, inputs, 0)
    want = []
    for i in (0, 1):
        s = distill.served(model.model.layers[i].self_attn, inputs[i])
        got = best = 0.0
        for t in range(TOPK, 30):  # the second document has no query with more than 8 keys
            p = (torch.einsum("hd,hkd->hk", s.q[:, t], s.k[:, : t + 1]) * s.scale).softmax(-1).mean(0)
            chosen = sorted(range(t + 1), key=lambda j: (-scores[t, j].item(), j))[:TOPK]
            got += p[chosen].sum().item()
            best += p.sort(descending=True).values[:TOPK].sum().item()
        want.append(got / best)
    assert distill.recall(model, inputs, starts, TOPK, chunk_size=7) == pytest.approx(want)
    assert max(want) < 0.99


# ------------------------------------------------------------------------------------------------ patterns
def logits(model: GlmMoeDsaForCausalLM) -> Tensor:
    with torch.no_grad():
        return model.lm_head(distill.hidden_states(model, *packed([60])))


def test_a_tried_pattern_equals_the_adopted_one_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = tiny("FFFFF")
    before, fields = logits(model), dict(model.config.to_dict())
    with trying(model, Schedule.from_pattern("FSFSS")):
        tried = logits(model)
        assert Schedule.from_config(model.config).pattern == "FSFSS"
        with pytest.raises(ValueError, match="layer 1 has no indexer"):
            adopt(model, Schedule.from_pattern("FFSSS"))
    assert torch.equal(logits(model), before)
    assert model.config.to_dict() == fields
    assert not torch.allclose(tried, before)

    adopt(model, Schedule.from_pattern("FSFSS"))
    model.save_pretrained(tmp_path)
    loaded = install(GlmMoeDsaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64))
    loaded.config._experts_implementation = "eager"
    assert list(indexers(loaded)) == [0, 2]
    assert torch.allclose(logits(loaded), tried, atol=1e-6)


def test_a_pattern_survives_an_exception_and_another_number_of_layers_is_refused() -> None:
    model = tiny("FF")
    with pytest.raises(RuntimeError), trying(model, Schedule.from_pattern("FS")):
        raise RuntimeError
    assert list(indexers(model)) == [0, 1]
    for change in (adopt, adopt_anew):
        with pytest.raises(ValueError, match="FFS given, must have the model's 2 layers"):
            change(model, Schedule.from_pattern("FFS"))


def test_new_indexers_come_where_there_were_none_and_nothing_else_changes() -> None:
    model = tiny("FS")
    before = {n: p.clone() for n, p in model.named_parameters()}
    adopt_anew(model, Schedule.from_pattern("FF"))
    after = dict(model.named_parameters())
    new = {n for n in after if n not in before or not torch.equal(after[n], before[n])}
    drawn = ("wq_b.weight", "wk.weight", "weights_proj.weight")
    assert new >= {f"model.layers.{i}.self_attn.indexer.{name}" for i in (0, 1) for name in drawn}
    assert all(".indexer." in n for n in new)
    assert after["model.layers.1.self_attn.indexer.wk.weight"].std().item() == pytest.approx(0.2, rel=0.2)


def test_selecting_everything_is_dense_and_ends() -> None:
    model = tiny("FF")
    sparse = logits(model)
    with selecting(model, EVERYTHING):
        dense = logits(model)
    assert not torch.allclose(dense, sparse)
    assert torch.equal(logits(model), sparse)
    with trying(model, Schedule.from_pattern("FS")), selecting(model, EVERYTHING):
        assert torch.allclose(logits(model), dense)


def test_overlap_is_the_share_of_common_keys() -> None:
    model = tiny("FSFF")
    ids, positions, starts = packed([30, 20])
    inputs = distill.record(model, ids, positions, starts)
    chosen = []
    for full in (0, 2, 3):
        scores = whole_scores(model, inputs, full).detach()
        rows = [t for t in range(50) if t - starts[t] >= TOPK]
        chosen.append(
            [set(sorted(range(int(starts[t]), t + 1), key=lambda j: (-scores[t, j], j))[:TOPK]) for t in rows]
        )
    got = overlap(model, inputs, starts, TOPK, chunk_size=7)
    for i, a in enumerate(chosen):
        for j, b in enumerate(chosen):
            want = sum(len(x & y) for x, y in zip(a, b, strict=True)) / TOPK / len(a)
            assert got[i, j].item() == pytest.approx(want, rel=1e-6)
    assert got[0, 1] < 0.9


# ------------------------------------------------------------------------------------------------ documents
def test_documents_are_laid_end_to_end_and_the_loss_counts_answers() -> None:
    from rl.documents import Part, encoded, pack, packs

    first = encoded([Part("ab"), Part("c", counted=True, ends=True)], lambda s: [ord(c) for c in s], 1, 2)
    assert first == ([1, 97, 98, 99, 2], [False, False, False, True, True])
    second = encoded([Part("xyz", counted=True)], lambda s: [ord(c) for c in s], None, 2)
    assert second[1] == [False, True, True]  # nothing predicts a first token
    p = pack([first, second])
    assert p.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert p.seq_start.tolist() == [0] * 5 + [5] * 3
    assert p.predicts.tolist() == [2, 3, 5, 6]
    assert [len(x.ids) for x in packs([first, first, second, first], 8)] == [5, 8, 5]
    with pytest.raises(ValueError, match="first token"):
        pack([([1], [True])])


def source(tmp_path: Path, tokenizer, lines: list[dict] | None = None, **keys):
    from rl.documents import DocumentSource
    from rl.indexshare_config import DataConfig

    if lines is not None:
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        keys |= {"source": "jsonl", "path": str(tmp_path / "data.jsonl")}
    return DocumentSource(DataConfig(**keys), tokenizer)


@pytest.fixture(scope="module")
def tokenizer(tiny_policy_dir: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_policy_dir)


def test_a_file_gives_text_that_counts_and_answers_that_count(tmp_path: Path, tokenizer) -> None:
    lines = [{"text": f"{i} text"} for i in range(5)] + [{"prompt": "q", "answer": "a"}]
    data = source(tmp_path, tokenizer, lines, held_out=1, max_tokens=6)
    texts = {tokenizer.decode(data.training(i)[0]) for i in range(5)}
    assert len(texts) == 5, "an epoch has every document"
    assert data.training(3)[1] == [False] + [True] * 5
    assert len(data.training(3)[0]) == 6
    (held,) = data.held_out()
    assert tokenizer.decode(held[0]) == "<s>qa</s>"
    assert held[1] == [False, False, True, True]


def test_recall_documents_are_a_function_of_seed_and_index(tmp_path: Path, tokenizer) -> None:
    knobs = {"pairs": 5, "questions": 2}
    a, b, other = (source(tmp_path, tokenizer, knobs=knobs, seed=s, held_out=3) for s in (0, 0, 1))
    assert [a.training(i) for i in range(4)] == [b.training(i) for i in range(4)]
    assert a.training(0) != a.training(1)
    assert a.training(0) != other.training(0)
    assert a.step(1) == [a.training(i) for i in range(8, 16)]
    assert a.step(1) != a.step(0)
    assert not {tuple(ids) for ids, _ in a.held_out()} & {tuple(a.training(i)[0]) for i in range(3)}
    ids, counted = a.training(0)
    *answers, rest = tokenizer.decode([t for t, c in zip(ids, counted, strict=True) if c]).split("</s>")
    assert len(answers) == 3
    assert rest == ""
    assert all(f":{answer} " in tokenizer.decode(ids) for answer in answers)


@pytest.mark.parametrize(
    ("lines", "keys", "said"),
    [
        ([{"text": "a"}], {"held_out": 1}, "data.held_out: 1 given, must be fewer than the 1"),
        ([{"text": "a"}, {"txt": "b"}], {"held_out": 1}, "line 2: must have `text`, or `prompt` and `answer`"),
        ([{"prompt": "a"}], {}, "line 1: must have"),
        (None, {"knobs": {"pairs": 99}}, "data.knobs: .*pairs: 99 given"),
        (None, {"knobs": {"bogus": 1}}, "data.knobs: .*bogus"),
    ],
)
def test_unusable_data_is_one_line(tmp_path: Path, tokenizer, lines, keys, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        source(tmp_path, tokenizer, lines, **keys)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------ the command
@pytest.fixture
def config(tmp_path: Path, tiny_policy_dir: Path):
    from rl.indexshare_config import DistillConfig, load

    path = tmp_path / "distill.yaml"
    path.write_text(
        f"run: {{out: {tmp_path}/runs}}\nmodel: {{path: {tiny_policy_dir}}}\n"
        "data: {knobs: {pairs: 6, questions: 3}, documents_per_step: 2, held_out: 2}\n"
        "indexer: {lr: 1.0e-2}\nwarmup: {steps: 4}\neval_every: 2\n"
    )
    return lambda *words: load(DistillConfig, path, words)


def state(path: Path) -> dict[str, Tensor]:
    return GlmMoeDsaForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_warm_up_moves_the_indexers_alone_and_reports_recall(config, tiny_policy_dir: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from rl.distill import distill as run
    from rl.distill import told

    directory = run(config())
    moved = changed(state(tiny_policy_dir), state(directory / "policy"))
    assert moved
    assert all(".indexer." in name for name in moved)
    assert {name.split(".")[2] for name in moved} == {"0", "1", "5"}

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= {f"recall/layer_{i:02d}" for i in range(6)} | {"recall/full", "recall/shared", "distill/kl"}
    assert [e.step for e in events.Scalars("recall/shared")] == [0, 2, 4]
    kl = [e.value for e in events.Scalars("distill/kl")]
    assert kl[-1] < kl[0]
    record = json.loads((directory / "distill.json").read_text())
    assert record["after"]["recall/full"] > record["before"]["recall/full"]
    # Under dense attention the indexers do not matter: a warm-up cannot change that loss.
    assert record["after"]["eval/lm_loss_dense"] == record["before"]["eval/lm_loss_dense"]
    assert "    2  Shared" in told(directory)


def test_sparse_training_moves_the_backbone_too_and_routers_stay(config, tiny_policy_dir: Path) -> None:
    from rl.distill import distill as run

    directory = run(config("warmup.steps=0", "sparse.steps=2", "sparse.backbone.lr=1e-3"))
    moved = changed(state(tiny_policy_dir), state(directory / "policy"))
    assert {"lm_head.weight", "model.layers.3.self_attn.kv_b_proj.weight"} <= moved
    assert "model.layers.5.self_attn.indexer.wk.weight" in moved
    assert not any(".gate." in name for name in moved)
    record = json.loads((directory / "distill.json").read_text())
    assert record["after"]["eval/lm_loss"] < record["before"]["eval/lm_loss"]


def test_micro_batches_do_not_change_a_step(config) -> None:
    from rl.distill import Student, cut, load_model, sparse_step, warmup_step
    from rl.documents import DocumentSource

    results = []
    for tokens in (1, 10_000):
        c = config(f"data.tokens_per_microbatch={tokens}", "answer_weight=3", "data.documents_per_step=3")
        model, tokenizer = load_model(c.model)
        student, documents = Student.of(model, c), DocumentSource(c.data, tokenizer).step(0)
        micro = cut(documents, c)
        assert len(micro) == (3 if tokens == 1 else 1)
        results.append(warmup_step(student, micro, c, 0.0) | sparse_step(student, micro, c, (0.0, 0.0)))
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_answers_weigh_as_configured(config) -> None:
    from rl.distill import _weights
    from rl.documents import pack

    (w,) = _weights([pack([([1, 5, 6], [False, False, True])])], 3.0)
    assert w.tolist() == pytest.approx([0.2, 0.6, 0.2])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["teachers=all"], "teachers: 'all' given, must be one of served, own"),
        (["sparse.support=some"], "sparse.support: 'some' given, must be one of all, selected"),
        (["model.index_topk=0"], "model.index_topk: 0 given, must be between 1 and"),
        (["model.path=nowhere"], "model.path: 'nowhere' given, must be a folder with a config.json"),
        (["warmup.steps=0"], "warmup.steps, sparse.steps: 0 given, must be together at least 1"),
        (["warmup.stepz=1"], "warmup.stepz: unknown key, did you mean warmup.steps?"),
        (["data.source=jsonl"], "data.path: None given, must be a JSONL file"),
        (["run.name=a/b"], "run.name: 'a/b' given, must be a plain name"),
        (["model.pattern=FFFSSF"], "model.pattern: FFFSSF given, but layer 2 has no indexer, the model is FFSSSF"),
        (["model.pattern=SFFFFF"], "model.pattern: the first layer is Shared"),
        (["model.pattern=FF"], "model.pattern: FF given, must have the model's 6 layers"),
        (["model.index_topk=500"], "data: held-out documents of at most"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(config, tmp_path: Path, capsys, words: list[str], said: str) -> None:
    from rl import cli

    assert cli.main(["indexshare", "distill", str(tmp_path / "distill.yaml"), *words]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("longppo")]
    assert len(err) == 1
    assert err[0].startswith(f"longppo: {said}")
    assert not (tmp_path / "runs").exists() or words == ["model.index_topk=500"]


def test_a_model_without_indexers_is_refused_and_a_run_is_not_overwritten(config, tokenizer, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    from rl.distill import load_model, run_directory

    LlamaConfig().save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    with pytest.raises(ConfigError, match="must be a glm_moe_dsa model, which has indexers; this is llama"):
        load_model(config(f"model.path={tmp_path}/llama").model)
    run_directory(config().run)
    with pytest.raises(ConfigError, match=r"run.name: 'distill' with run.seed 0 given, but .* is there already"):
        run_directory(config().run)


def test_the_configuration_reads_back_and_the_example_files_are_right(config, tmp_path: Path) -> None:
    from rl.indexshare_config import DistillConfig, SearchConfig, load, to_yaml

    c = config("answer_weight=2", "model.pattern=FFSSSS")
    (tmp_path / "again.yaml").write_text(to_yaml(c))
    assert load(DistillConfig, tmp_path / "again.yaml") == c
    for schema, name in ((DistillConfig, "distill"), (SearchConfig, "search")):
        load(schema, Path(__file__).parents[1] / "configs" / f"indexshare_{name}.yaml")
