"""The claims of the paper, each with a verdict that is computed from the results.

A claim that something helps is *reproduced* if the whole interval of our difference is above zero, and *refuted* if it is
not and the paper's own difference lies above the interval. A claim that DLL stays within some points of backpropagation is
*reproduced* if our whole interval lies above the paper's difference, and *refuted* if all of it lies below. A claim that a
rule fails is *refuted* if the whole interval of its difference to the control lies above zero, and *reproduced* if none of
it does. Without runs, or if the interval allows both, a claim is *untested*; where data or inputs are not the paper's, it
is *not comparable*. The claim about the criteria is judged by the audit, that about the learning rate by the best of the
rates that were tried on each network, and that about the cost by one measured ratio.
"""

from typing import NamedTuple

from apical.plausibility.criteria import read_verdicts
from tools.pages.facts import PLACES, Facts
from tools.pages.significance import Estimate

REPRODUCED, REFUTED, OTHER_DATA, UNTESTED = "reproduced", "refuted", "not comparable", "untested"
CNNS = [place for place in PLACES if place[0] == "cnn"]
RATE, STEP = 1e-4, 5.0
"""The learning rate around which the paper finds the best ones, and the step from one rate of its figure to the next."""


class Claim(NamedTuple):
    """A claim, the verdict on it, the number that decides, the paper's number, and where to read more."""

    claim: str
    verdict: str
    ours: str
    paper: str
    link: str


def judge_gain(ours: Estimate, paper: float) -> str:
    """Judge the claim that something helps, by our difference and the paper's."""
    if not ours.known:
        return UNTESTED
    if ours.low > 0:
        return REPRODUCED
    return REFUTED if ours.high < paper else UNTESTED


def judge_gap(ours: Estimate, paper: float) -> str:
    """Judge the claim that a difference to backpropagation is as small as the paper's."""
    if not ours.known:
        return UNTESTED
    if ours.high < paper:
        return REFUTED
    return REPRODUCED if ours.low >= paper else UNTESTED


def judge_failure(over_control: Estimate) -> str:
    """Judge the claim that a rule fails, by its difference to the control whose hidden layers stay random."""
    if not over_control.known:
        return UNTESTED
    if over_control.low > 0:
        return REFUTED
    return REPRODUCED if over_control.high <= 0 else UNTESTED


def judge_claims(facts: Facts) -> list[Claim]:
    """Judge all claims, the paper's main ones first."""
    return [
        _judge_criteria(facts),
        _judge_rivals(facts),
        _judge_theta(facts),
        *_judge_gaps(facts),
        *_judge_failures(facts),
        _judge_depth(facts),
        _judge_rate(facts),
        _judge_cost(facts),
        *_judge_sequences(facts),
    ]


def _judge_criteria(facts: Facts) -> Claim:
    met = read_verdicts()["dll"]
    verdict = REFUTED if False in met else UNTESTED if None in met else REPRODUCED
    said = f"C1 to C3: {facts.criteria('dll')}"
    return Claim("DLL meets all three criteria", verdict, said, "✓✓✓", "[audit](audit.md)")


def find_rival(facts: Facts) -> str:
    """Return the best on average, in table 1, of the other rules to which the paper ascribes all three criteria."""
    tried = {cell.job.rule for cell in facts.cells("table1")}
    rivals = [r for r in facts.rules_with_all_criteria("paper") if r in tried and not r.startswith("dll")]
    return max(rivals, key=lambda rule: _get_mean(facts.average_score("table1", rule)))


def _get_mean(score: Estimate) -> float:
    return score.mean if score.seeds else float("-inf")


def _judge_rivals(facts: Facts) -> Claim:
    rival = find_rival(facts)
    ours = facts.average_gain("table1", "dll", rival)
    paper = facts.paper_average("dll") - facts.paper_average(rival)
    return Claim(
        "DLL is the best of the rules to which the paper ascribes all three",
        judge_gain(ours, paper),
        f"`dll` − `{rival}`, mean of table 1: {ours.signed}",
        f"{paper:+.2f}",
        "[baselines](#how-strong-are-the-baselines)",
    )


def _judge_theta(facts: Facts) -> Claim:
    ours = facts.gain("table3", "dll", "dll:frozen", "cnn", "cifar10")
    paper = facts.paper("dll", "cnn", "cifar10") - facts.paper("dll:frozen", "cnn", "cifar10")
    return Claim(
        "Learning Θ is critical",
        judge_gain(ours, paper),
        f"`dll` − `dll:frozen`, CIFAR-10 CNN: {ours.signed}",
        f"{paper:+.2f}",
        "[Θ](#does-it-help-that-feedback-weights-learn)",
    )


def _judge_gaps(facts: Facts) -> list[Claim]:
    table1, paper = facts.average_gain("table1", "dll", "bp"), facts.paper_average("dll") - facts.paper_average("bp")
    said = f"`dll` − `bp`, mean of table 1: {table1.signed}"
    first = Claim(
        "DLL is comparable to backpropagation",
        judge_gap(table1, paper),
        said,
        f"{paper:+.2f}",
        "[table 1](results/table1.md)",
    )
    claims = [first]
    for data, title, metric in (("cifar100", "CIFAR-100", "accuracy"), ("tiny_imagenet", "Tiny-ImageNet", "error")):
        ours, sign = facts.gain("images-large", "dll", "bp", "cnn", data), 1 if metric == "accuracy" else -1
        paper = sign * (facts.paper("dll", "cnn", data, metric) - facts.paper("bp", "cnn", data, metric))
        said, link = f"`dll` − `bp`: {ours.signed}", "[larger images](#does-dll-keep-up-on-larger-images)"
        claims.append(Claim(f"… and on {title}", judge_gap(ours, paper), said, f"{paper:+.2f}", link))
    return claims


def _judge_failures(facts: Facts) -> list[Claim]:
    claims = []
    for rule, name in (("ff", "Forward-forward"), ("ep", "Equilibrium propagation")):
        over, score = facts.average_gain("table1", rule, "readout", CNNS), facts.average_score("table1", rule, CNNS)
        paper, link = facts.paper_average(rule, CNNS), "[baselines](#how-strong-are-the-baselines)"
        said = f"mean of the four CNNs: {score} %"
        claims.append(Claim(f"{name} fails on CNNs", judge_failure(over), said, f"{paper:.2f} %", link))
    score = facts.score("table2", "dll:frozen", "rnn", "tinyshakespeare")
    said, link = f"next character, another text: {score} %", "[table 2](results/table2.md)"
    paper = facts.paper("dll:frozen", "rnn", "harry_potter")
    return [*claims, Claim("DLL-FA fails on RNNs", OTHER_DATA, said, f"{paper:.2f} %", link)]


def _judge_depth(facts: Facts) -> Claim:
    ours = facts.depth_gain("dll", "mlp", "mlp-1024")
    paper = facts.paper("dll", "mlp", "mnist") - facts.paper("dll", "mlp-1024", "mnist")
    return Claim(
        "Accuracy rises with depth",
        judge_gain(ours, paper),
        f"three − one hidden layers, MNIST: {ours.signed}",
        f"{paper:+.2f}",
        "[depth](#does-accuracy-rise-with-depth)",
    )


def _judge_rate(facts: Facts) -> Claim:
    best = [facts.best_rate("sensitivity", "dll", *place) for place in PLACES]
    count = sum(rate is not None and 1 / STEP - 1e-9 <= rate / RATE <= STEP + 1e-9 for rate in best)
    verdict = UNTESTED if None in best else REPRODUCED if 2 * count > len(best) else REFUTED
    exact = best.count(RATE)
    said = f"within a factor of {STEP:.0f} in {count} of {len(best)} networks, exactly there in {exact} (one seed each)"
    return Claim(
        "The best rate is around 1e-4 for most networks",
        verdict,
        said,
        "most",
        "[rates](#how-sensitive-is-dll-to-its-learning-rate-and-to-the-length-of-sequences)",
    )


def _judge_cost(facts: Facts) -> Claim:
    times = [facts.seconds("cost", rule, "cnn", "cifar10", batch_size=64) for rule in ("dll", "bp")]
    paper = facts.paper_seconds("dll", "cnn") / facts.paper_seconds("bp", "cnn")
    link = "[cost](#what-does-it-cost)"
    if None in times:
        return Claim("DLL takes longer than backpropagation", UNTESTED, "not run yet", f"× {paper:.2f}", link)
    ratio = times[0] / times[1]  # type: ignore[operator]  # neither is None
    verdict, said = REPRODUCED if ratio > 1 else REFUTED, f"an epoch of the CIFAR-10 CNN: × {ratio:.2f} (one run)"
    return Claim("DLL takes longer than backpropagation", verdict, said, f"× {paper:.2f}", link)


def _judge_sequences(facts: Facts) -> list[Claim]:
    text = facts.gain("text", "dll", "bp", "textcnn", "mr")
    paper = facts.paper("dll", "textcnn", "mr") - facts.paper("bp", "textcnn", "mr")
    pc, theirs = (
        facts.gain("table2", "dll", "pc", "rnn", "tinyshakespeare"),
        facts.paper("dll", "rnn", "harry_potter") - facts.paper("pc", "rnn", "harry_potter"),
    )
    words, table2 = "[sentences](results/text.md)", "[table 2](results/table2.md)"
    series = "Electricity, METR-LA and PEMS-BAY could not be had"
    return [
        Claim(
            "DLL trains TextCNNs",
            OTHER_DATA,
            f"`dll` − `bp`, MR, other word vectors: {text.signed}",
            f"{paper:+.2f}",
            words,
        ),
        Claim(
            "DLL trains RNNs on characters, below PC",
            OTHER_DATA,
            f"`dll` − `pc`, another text: {pc.signed}",
            f"{theirs:+.2f}",
            table2,
        ),
        Claim("DLL is on par with backpropagation on time series", UNTESTED, series, "", table2),
    ]


def render_claims(claims: list[Claim]) -> list[str]:
    """Render the table of claims as lines of Markdown."""
    lines = ["| the paper says | verdict | our number [95 % interval] | the paper's | more |", "|---|---|---|---|---|"]
    return lines + [f"| {c.claim} | **{c.verdict}** | {c.ours} | {c.paper} | {c.link} |" for c in claims]
