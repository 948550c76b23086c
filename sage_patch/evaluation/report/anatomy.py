"""The sections of a report that look inside: one head of each model, who shares a scale, the paper's ablations."""

from __future__ import annotations

from sage_patch.evaluation.report.blocks import Block, Cell, Channels, Grid, Maps, Node, Section, Tile
from sage_patch.evaluation.report.sections import HEAT, models_of, section


def anatomy(files: list[Node]) -> list[Section]:
    """One head of each model: its attention under four recipes, K's channels, who shares a scale."""
    sections: list[Section] = []
    for file in files:
        for title, model in models_of(file):
            maps = Maps(
                model["q_len"].value, model["kv_len"].value, model["unit"].value,
                tuple((name, model["maps"][name]) for name in model["maps"].value),
            )  # fmt: skip
            lines = [
                (e["name"].value, f"`{e['recipe'].value}`", e["misplaced"].number(".2%"), e["cosine"].number(".4%"),
                 e["rel_l1"].number(".4f"), e["worst_row"].number(".3f"))
                for e in model["errors"]
            ]  # fmt: skip
            table = Grid(
                "", ("<", "<recipe", "misplaced", "cosine", "relative L1", "worst row"), tuple(lines),
                "misplaced: share of a query's attention that lands in another bin of keys than in the exact map, mean "
                "over queries. The rest is of the head's output, against exact attention.",
            )  # fmt: skip
            key = model["key"]
            channels = Channels(
                "Largest magnitude of each channel of K", "|K|",
                (("as it is", "smooth=none", key["largest"]), ("smoothed", "int8", key["largest_smoothed"])),
            )  # fmt: skip
            steps = Grid(
                "Mean step of K's INT4 grid", ("<K", "step"),
                (("as it is", key["int4_step"].number(".3f")), ("smoothed", key["int4_step_smoothed"].number(".3f"))),
                "One scale for the tokens of a group; the step is its largest magnitude over 7.",
            )  # fmt: skip
            where = f"`{model['site'].value}`, query head {model['head'].value} of {model['heads'].value}"
            words = (
                f"{where}: {model['chosen'].value}. Each pixel is the attention that a bin of queries gives to a bin "
                f"of keys, of {model['q_len'].value} queries and {model['kv_len'].value} keys, head_dim "
                f"{model['head_dim'].value}. INT4 with and without smoothing differ in nothing else."
            )
            blocks = [maps, table, [channels, steps]]
            name = f"head-{len(sections) + 1}"
            sections.append(section(name, f"One head: {title}", words, blocks, [file]))
    return [*sections, *_group_map(files), *_outliers(files)]


def _outliers(files: list[Node]) -> list[Section]:
    """How uneven K's channels are, by layer and head."""
    stages, figures = ("given", "smoothed", "rotated"), {"ratio": ".2f", "kurtosis": ".2f", "energy": ".1%"}
    blocks: list[Block] = []
    for file in files:
        for title, model in models_of(file):
            if model.get("outliers"):
                lines: list[tuple[Cell, ...]] = [
                    (f"`{r['site'].value}`, {r['kv_head'].value}",
                     *(r[stage][key].number(form) for key, form in figures.items() for stage in stages))
                    for r in model["outliers"]
                ]  # fmt: skip
                heads = [f"{key}, {stage}" for key in figures for stage in stages]
                blocks.append(Grid(title, ("<site, head of K", *heads), tuple(lines)))
    words = (
        "What sets the step of K's integers: the largest magnitude of any channel over the median channel's (ratio), "
        "kurtosis of its numbers (3: normal), and the share of energy in the largest thirty-second of the channels; of "
        "K as it is, less its mean, and then rotated by a Hadamard matrix."
    )
    return [section("outliers", "Outlier channels by layer and head", words, blocks, files)] if blocks else []


def _group_map(files: list[Node]) -> list[Section]:
    for file in files:
        for _, model in models_of(file):
            groups = model["groups"]
            words = (
                "Per-thread quantization gives one scale to the tokens that one thread of a tensor core holds, which "
                "costs no more than one scale a block and is nearly as fine as one a token. A square is a token of a "
                f"tile of {groups['tile'].value}, 16 a line, with the number of its group."
            )
            tiles: list[Block] = [
                Tile("Keys: four groups of 32, by the token's number modulo 8", groups["key"], 4),
                Tile("Query rows: pairs eight apart; a line is a warp", groups["query"], 8),
            ]
            return [section("groups", "Which tokens share a scale", words, [tiles], [file])]
    return []


def ablation(files: list[Node]) -> list[Section]:
    """The paper's tables on real tensors, models side by side."""
    blocks: list[Block] = []
    for file in files:
        models = models_of(file)
        titles = dict.fromkeys(t for _, m in models for t in m["tables"].value)
        for table in titles:
            recipes = [r["recipe"].value for r in models[0][1]["tables"][table]]
            lines: list[tuple[Cell, ...]] = [
                (f"`{recipe}`", *(m["tables"][table][i]["rel_l1"].number(".4f") for _, m in models))
                for i, recipe in enumerate(recipes)
            ]
            blocks.append(Grid(table, ("<variant", *(title for title, _ in models)), tuple(lines), heat=HEAT))
    words = (
        "Mean relative L1 error over captured calls of each model, run exact: what smoothing, the granularity of "
        "scales and the type of P and V buy. From worst to best as the method's authors found them."
    )
    return [section("ablation", "What smoothing, granularity and FP16 buy", words, blocks, files)] if blocks else []
