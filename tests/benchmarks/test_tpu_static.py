import importlib.util
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.harness import Measurement
from benchmarks.research.tpu_static.__main__ import FULL, SCHEDULE_BARS, SECTIONS, Run
from benchmarks.research.tpu_static.bundles import Kernel, Loop, read
from benchmarks.research.tpu_static.compile import Compiled, Program, compiled, reason
from benchmarks.research.tpu_static.figures import NotMeasuredError, bundles, key_blocks, of_pass, scheduled

pytestmark = pytest.mark.research

HEAD = """= control target key start
LH: loop header
LB: loop body
= control target key end

"""


class Dump:
    """The text of a schedule, written bundle by bundle."""

    def __init__(self):
        self.lines = []

    def add(self, *instructions, depth=1, label="", regions=(), times=1):
        for _ in range(times):
            address = "0" if not self.lines else f"{len(self.lines):#x}"
            started = f" /* {' :: '.join(f'Start region {region}' for region in regions)} */" if regions else ""
            code = "  ;;  ".join(instructions)
            self.lines.append(f"{address:>6} {label:>2} : {'>' * depth} {{ {code} }}{started}")
        return self

    def skip(self, region):
        """A branch to a region that comes later, and what is executed all the same."""
        return self.add(f"%9 = sbr.rel (%p1_p0) target = $region{region}").add(times=4)

    def back(self, region, depth=1):
        return self.add(f"%9 = sbr.rel (!%p1_p0) target = $region{region}", depth=depth).add(depth=depth, times=4)

    def read(self):
        return read("kernel", len(self.lines), HEAD + "\n".join(self.lines) + "\n")


PRODUCT = "%5 = vmatmul.msk.bf16.gmra.mxu0 %vm1_vm1, %v2_v2 /* = vmatmul in words */"
EXPONENTIAL = "%6 = vpow2.f32 %v3_v3"
SELECT = "%v4_v4 = vsel /*vm=*/%vm1_vm1, /*on_true_vy=*/%v3_v3, /*on_false_vx=*/-1e+30"
TRANSFER = "%8 = dma.hbm_to_vmem [thread:$0]  (%p1_p1), /*hbm=*/%s1_s1"
WAIT = "%8 = dma.done.wait [#allocation6], 8192"


def grid():
    """A loop over a grid, as splash attention has it: first step, body, last step, and what each step costs."""
    dump = Dump().add(depth=0, times=3)
    dump.add(TRANSFER, label="LB", regions=(7, 8)).skip(1)
    dump.add("%1 = vst %v1_v1", times=20)  # the first step of a row
    dump.add(regions=(1,), label="PF").skip(2)
    dump.add(PRODUCT, EXPONENTIAL, times=10).add(SELECT, times=5)
    dump.add(regions=(2,), label="PF").skip(3)
    dump.add("%1 = vlog2.f32 %v1_v1", times=30)  # the last
    return dump.add(WAIT, regions=(3,), label="PF").back(7).add(depth=0, times=2)


def nested():
    """A grid whose steps hold a loop over key blocks without a mask and, shorter as it happens, one with."""
    dump = Dump().add(depth=0, times=2).add(label="LB", regions=(1,)).skip(3)
    dump.add(PRODUCT, EXPONENTIAL, depth=2, label="LB", regions=(2,)).add(PRODUCT, depth=2, times=9).back(2, depth=2)
    dump.add(regions=(3,), label="PF")
    dump.add(PRODUCT, EXPONENTIAL, SELECT, depth=2, label="LB", regions=(4,)).add(depth=2, times=4).back(4, depth=2)
    return dump.add(times=6).back(1)


def two_ways():
    dump = Dump().add(depth=0).add(label="LB", regions=(1,)).skip(2)
    dump.add(PRODUCT, EXPONENTIAL, SELECT, times=30)
    dump.add(regions=(2,)).skip(3).add(PRODUCT, EXPONENTIAL, times=20)
    return dump.add(regions=(3,)).back(1)


def transfers():
    dump = Dump().add(depth=0).add(label="LB", regions=(1,)).skip(2).add(TRANSFER, times=3)
    dump.add(regions=(2,)).skip(3).add(times=5).add(TRANSFER)
    return dump.add(PRODUCT, regions=(3,)).back(1)


def unconditional():
    dump = Dump().add(depth=0).add(label="LB", regions=(1,)).skip(2)
    dump.add(TRANSFER).add("%9 = sbr.rel target = $region3").add(times=4)
    return dump.add(regions=(2,)).add(PRODUCT, times=50).add(regions=(3,)).back(1)


# --- Reading schedules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "bundles", "skipped", "products", "starts"),
    [
        (grid, 6 + 20 + 6 + 15 + 6 + 30 + 6, 20 + 30, 10, 1),  # what an ordinary key block does not need
        (two_ways, 6 + 30 + 6 + 20 + 6, 30, 20, 0),  # the longer of two ways with products
        (transfers, 6 + 3 + 6 + 6 + 6, 0, 1, 4),  # no start of a transfer
        (unconditional, 6 + 6 + 51 + 6, 6, 50, 0),  # what ends in a branch without a condition never comes to products
    ],
)
def test_a_path_is_the_shortest_through_what_a_key_block_needs(schedule, bundles, skipped, products, starts):
    (loop,) = schedule().read().loops
    assert (loop.innermost, loop.bundles, loop.path) == (True, bundles, bundles - skipped)
    assert (loop.counts["products"], loop.counts["transfers"]) == (products, starts)
    if schedule is grid:
        assert (loop.counts["exponentials"], loop.counts["selects"]) == (10, 5)


def test_the_main_loop_is_the_one_that_masks_least():
    kernel = nested().read()
    outer, plain, masked = kernel.loops
    assert [loop.innermost for loop in kernel.loops] == [False, True, True]
    assert (plain.bundles, plain.path, masked.bundles) == (15, 15, 10)
    assert kernel.main is plain
    assert outer.bundles == 6 + 15 + 1 + 10 + 6 + 5


def test_a_loop_without_products_has_no_path_and_exponentials_in_bfloat16_count_twice():
    kernel = Dump().add(depth=0).add(EXPONENTIAL, label="LB", regions=(1,)).back(1).read()
    assert (kernel.loops[0].path, kernel.main) == (0, None)
    kernel = Dump().add().add(PRODUCT, "%6 = vpow2.bf16 %v3_v3", regions=(1,)).back(1).read()
    assert kernel.main.counts["exponentials"] == 2


def test_a_branch_may_go_to_the_end_which_has_no_name():
    dump = Dump().add("%9 = sbr.rel (%p1_p0) target = $region9", depth=0).add(depth=0, times=4)
    dump.add(PRODUCT, label="LB", regions=(1,)).back(1).add("/* exit bundle: %kernel.1 = custom-call() */", depth=0)
    dump.lines[4] += " /* \nbase_bounds: (64, 1)\n 0x5   :  words */"  # a comment is no bundle
    assert [loop.bundles for loop in dump.read().loops] == [6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("  0x5 ", "  0x6 "), "bundles must be numbered one by one, got 0x6 after 0x4"),
        (lambda text: text.replace("Start region 7", "7"), "must go to a region that starts somewhere, got region 7"),
        (lambda text: text.replace("region 8", "region 1"), "a region must start once, got region 1"),
        (lambda text: text + "  0x5f   :  { }\n", "bundles must be"),
        (lambda text: "", "bundles must be .* got 0 for kernel"),
    ],
)
def test_what_is_not_understood_is_no_figure(change, message):
    dump = grid()
    with pytest.raises(ValueError, match=message):
        read("kernel", len(dump.lines), change(HEAD + "\n".join(dump.lines) + "\n"))


# --- Figures ---------------------------------------------------------------------------------------------------------

OURS = Program("v5e:2x2", "alibi", 16384, 64, False)
EMPTY = Measurement("group", "ours", "splash", "bundles", bar=SCHEDULE_BARS[False])


def kernel(name, bundles, exponentials, products):
    loop = Loop(bundles, True, bundles, Counter(products=products, exponentials=exponentials))
    return Kernel(name, 2 * bundles, (loop,))


SPLASH = Compiled(1000, (kernel("splash", 1000, 320, 384),))


FORWARD = {320: 1, 576: 2, 1280: 4, 0: None, 160: None}  # exponentials, and key blocks; None for smaller blocks
BACKWARD = {256: 1, 512: 2, 64: None, 128: None}


@pytest.mark.parametrize(
    ("gradient", "exponentials", "blocks"),
    [(gradient, *each) for gradient, known in enumerate((FORWARD, BACKWARD)) for each in known.items()],
)
def test_key_blocks_of_an_iteration_by_its_exponentials(gradient, exponentials, blocks):
    one = kernel("one", 1000, exponentials, 1)
    if blocks:
        assert key_blocks(one, gradient) == blocks
        return
    with pytest.raises(NotMeasuredError, match="blocks must be of 512 x 512, got"):  # smaller ones are not compared
        key_blocks(one, gradient)


def test_bundles_are_those_of_a_key_block():
    ours = Compiled(1000, (kernel("ours", 2100, 640, 512),))  # two blocks
    done = scheduled(EMPTY, False, ours, SPLASH, SPLASH)
    assert (done.values, done.ratio) == ((1050, 1000), 1.05)
    assert done.verdict(True) == "met"


@pytest.mark.parametrize(
    ("found", "note"),
    [
        (Compiled(None, (), "XlaRuntimeError: out of memory"), "out of memory"),
        (Compiled(1, (), "the compiler must write down a schedule, got none for x"), "got none for x"),
        (Compiled(1, (kernel("ours", 100, 256, 128),)), "must hold 250 products, got 128"),
        (Compiled(1, (Kernel("ours", 5, ()),)), "must hold a loop with matrix products"),
    ],
)
def test_what_is_missing_is_not_measured_and_not_met(found, note):
    done = scheduled(EMPTY, False, found, SPLASH, SPLASH)
    assert note in done.note
    assert done.verdict(True) == "not measured"


def test_backward_kernels_are_those_that_are_not_forward():
    parts = tuple(kernel(name, 1000, 256, 1) for name in ("alibi_forward", "alibi_dq", "alibi_dkv"))
    assert of_pass(Compiled(1, parts), True) == list(parts[1:])
    assert bundles(Compiled(1, parts), True) == (2000, 2)
    with pytest.raises(NotMeasuredError, match="must have forward or fwd in its name"):
        bundles(Compiled(1, parts[1:]), True)


def test_the_reason_is_the_line_that_says_it():
    text = "Traceback:\n  File x\njax.errors.JaxRuntimeError: RESOURCE: E1\nRan out of vmem\n\nmore\n"
    assert reason(text) == "jax.errors.JaxRuntimeError: RESOURCE: E1 Ran out of vmem"
    assert reason("ValueError: no\n-------\nnote") == "ValueError: no"


# --- The benchmark ---------------------------------------------------------------------------------------------------


def like_splash(program):
    back = [kernel(name, 1500, 256, 512) for name in ("a_dq", "a_dkv")] if program.gradient else []
    return Compiled(program.length * 100, (kernel("a_fwd", 1000, 320, 384), *back))


def a_run(ours):
    """Return a run with what a compiler might say, and verdicts, where there are bars."""
    said = {"alibi": ours, "splash": like_splash, "dense": like_splash}
    run = Run(FULL, lambda program: said[program.name](program), lambda *_: (105, 100))
    measurements = [measured for section in SECTIONS.values() for measured in section(run)]
    return run, [each.verdict(True) for each in measurements if each.bar is not None]


def test_a_run_that_meets_all_bars():
    run, verdicts = a_run(like_splash)
    # 3 TPUs, 2 head sizes, 2 passes: memory, growth, schedule; 2 lengths, 2 head sizes: blocks
    assert verdicts == ["met"] * 40
    assert {loop["kernel"] for loop in run.loops} == {"a_fwd", "a_dq", "a_dkv"}


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        (lambda found, length: {"temporaries": length * 100 + 1}, ["missed"] * 12),
        (lambda found, length: {"temporaries": length**2}, ["missed"] * 24),
        (lambda found, length: {"kernels": (), "problem": "no schedule"}, ["not measured"] * 12),
        (lambda found, length: {"temporaries": None, "problem": "ValueError: no"}, ["not measured"] * 36),
    ],
)
def test_a_missed_bar_or_a_missing_figure_fails(change, missed):
    def ours(program):
        found = like_splash(program)
        return replace(found, **change(found, program.length))

    _, verdicts = a_run(ours)
    assert [each for each in verdicts if each != "met"] == missed


# --- The compiler ----------------------------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None or importlib.util.find_spec("jax") is None,
    reason="libtpu, the compiler for TPUs, is not installed",
)


@needs_compiler
def test_splash_attention_is_read():
    pytest.importorskip("jax")
    found = compiled(Program("v5e:2x2", "splash", 1024, 64, True, (False,)))
    assert found.problem == ""
    assert found.temporaries > 0
    forward, dq, dkv = found.kernels
    assert ["fwd" in forward.name, "dq" in dq.name, "dkv" in dkv.name] == [True] * 3
    for each, gradient, products in ((forward, False, 2), (dq, True, 3), (dkv, True, 4)):
        assert key_blocks(each, gradient) == 1
        assert each.bundles > each.main.bundles > each.main.path > 500
        assert each.main.counts["selects"] > 0  # it has a mask for every block
        assert each.main.counts["products"] == pytest.approx(128 * products, rel=0.5)


@needs_compiler
def test_what_does_not_compile_says_why():
    found = compiled(Program("v5e:2x2", "nothing", 16, 64, False))
    assert (found.temporaries, found.problem) == (None, "KeyError: 'nothing'")
