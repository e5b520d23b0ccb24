"""A session as a script: translation, the choice of cells, and the order of the text. No processes."""

from __future__ import annotations

import hashlib
import io
import re
import sys
import time
import types
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import numpy
import pytest
import torch

from ddip.errors import BadInput
from ddip.export import check, job_files, script, selection, translation
from ddip.export.job_files import JobShape
from ddip.export.record import Choice, Execution, Push, Session
from ddip.export.selection import LeftOut, Plan
from ddip.group.cells.history import KEPT, SENT_BYTES, History
from ddip.notebook import executions
from ddip.protocol.objects import pickling
from ddip.sharded import values

EVERYONE = (0, 1)
IN_NOTEBOOK = None
Cell = str | tuple[str, tuple[int, ...] | None] | Execution | Push
"""A cell on both ranks, a cell on other ranks, or a push."""


def session_of(*cells: Cell) -> Session:
    """Return a session of two ranks that ran these cells."""
    found: list[Execution | Push] = []
    for number, cell in enumerate(cells, 1):
        if isinstance(cell, (Execution, Push)):
            found.append(cell)
        else:
            found.append(Execution(number, cell, EVERYONE) if isinstance(cell, str) else Execution(number, *cell))
    return Session(seeds=(5, 6), events=tuple(found))


def plan_of(*cells: Cell, **choice: object) -> Plan:
    return selection.plan_script(session_of(*cells), Choice(**choice))  # type: ignore[arg-type]


def refusals_of(*cells: Cell, **choice: object) -> list[str]:
    return [refusal.text for refusal in plan_of(*cells, **choice).refusals]


def script_of(*cells: Cell, **choice: object) -> str:
    """Return the script's text, which must be valid Python."""
    session, chosen = session_of(*cells), Choice(**choice)  # type: ignore[arg-type]
    plan = selection.plan_script(session, chosen)
    assert chosen.partial or not plan.refusals
    text = script.write_script(plan, session, chosen, "train.py", "train.data.pickle" if plan.data else "")
    compile(text, "train.py", "exec")
    return text


def push_of(number: int, ranks: tuple[int, ...] = EVERYONE, **values: object) -> Push:
    file = io.BytesIO()
    torch.save(values, file, pickle_module=cloudpickle)
    return Push(number, tuple(values), ranks, file.getvalue())


def left_out(plan: Plan) -> dict[int, str]:
    return {part.number: part.reason for part in plan.parts if isinstance(part, LeftOut)}


def main_of(text: str) -> str:
    """Return the body of the script's main function, without indentation."""
    body = text.partition('in the order of the session."""\n')[2].partition("\n\n\nif __name__")[0]
    return "\n".join(line[4:] for line in body.splitlines())


# -- translation


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        ("!python -c 'print(1)'", "subprocess.run(\"python -c 'print(1)'\", shell=True)"),
        (
            "files = !ls",
            "files = subprocess.run('ls', shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, "
            "errors='replace').stdout.splitlines()",
        ),
        ("%cd data", "os.chdir('data')"),
        ("%env A=b", "os.environ['A'] = 'b'"),
        ("%set_env A b c", "os.environ['A'] = 'b c'"),
        ("%time fit(3)", "fit(3)"),
        ("%matplotlib inline", "# %matplotlib inline"),
        ("%config InlineBackend.rc = {}", "# %config InlineBackend.rc = {}"),
        ("model?", "# %pinfo model"),
        ("if n:\n    !touch x", "if n:\n    subprocess.run('touch x', shell=True)"),
        ("x;  # no output", "x  # no output"),
    ],
)
def test_a_line_becomes_plain_python(typed: str, plain: str) -> None:
    (statement,) = translation.translate_cell(typed)
    if typed == "files = !ls" and statement.problem:
        pytest.skip("IPython 7 cannot read this on Python 3.12 and later")
    assert (statement.text, statement.problem) == (plain, "")


@pytest.mark.parametrize(
    "typed",
    [
        "%run other.py",
        "%%bash\nls",
        "!touch $HOME",
        "!touch {n}",
        "%timeit -n 2 fit(3)",
        "get_ipython().ask_exit()",
        "async for x in y:\n    print(x)",
        "%env A=$B",
        "%autoreload 2",
        "x = await load(1)",
        "from torch import *",
        "x = input()",
        "sys.exit(0)",
        "import ipywidgets",
        "%diprun -m package.train",
    ],
)
def test_a_line_without_a_translation_is_named(typed: str) -> None:
    (statement,) = translation.translate_cell(typed)
    assert statement.problem.startswith(typed.partition("\n")[0])


@pytest.mark.parametrize(
    ("code", "is_doubtful"),
    [
        ("words = list(set(text))", True),
        ("words = sorted(list(set(text)))", False),
        ("n = len({*text})", False),
        ("names = {'a', 'b'}", True),
        ("import albumentations as A", True),
        ("r = random.Random()", True),
        ("r = random.Random(3)", False),
        ("def f():\n    return np.random.default_rng()", True),
        ("torch.seed()", True),
        ("torch.manual_seed(int(time.time()))", True),
        ("torch.manual_seed(3)", False),
        ("exec('x = 1')", True),
        ("n = len(globals())", True),
        ("words = sorted(set(text), key=len)", True),
        ("word = max({*text}, key=len)", True),
        ("word = min(set(text), **options)", True),
        ("groups = defaultdict(set)", True),
        ("found = list(map(set, texts))", True),
        ("words = list(set.union(*texts))", True),
        ("n = len(set.union(*texts))", False),
        ("ok = isinstance(x, set) and isinstance(r, random.Random)", False),
        ("def make(n, seed=None):\n    return default_rng(seed)", True),
        ("def make(*, seed=None):\n    return default_rng(seed=seed)", True),
        ("class A:\n    def __init__(self, seed=None):\n        self.r = Random(self.seed)", True),
        ("seed = None if x else 3\nr = default_rng(seed)", True),
        ("def make(seed=3):\n    return default_rng(seed)", False),
        ("r = field(default_factory=random.Random)", True),
        ("x = f(seed)", False),
    ],
)
def test_values_that_differ_between_processes_are_doubted(code: str, is_doubtful: bool) -> None:
    assert any(refusal.is_doubt for refusal in plan_of(code).refusals) == is_doubtful


def test_a_seed_that_another_cell_sets_to_none_is_doubted() -> None:
    (refusal,) = refusals_of("import random\nseed = None", "r = random.Random(seed)")
    assert refusal == "cell 2: r = random.Random(seed): Random() draws from the system's entropy"


def test_the_body_of_a_timed_cell_stays() -> None:
    assert [statement.text for statement in translation.translate_cell("%%time\nx = 1\ny = 2")] == ["x = 1", "y = 2"]


def test_statements_keep_their_comments_and_strings() -> None:
    code = '# above\nx = """a\n  b"""  # beside\n\n@wrap\ndef f():\n    return 1'
    assert [statement.text for statement in translation.translate_cell(code)] == [
        '# above\nx = """a\n  b"""  # beside',
        "\n@wrap\ndef f():\n    return 1",
    ]


# -- which cells run


def test_a_training_cell_that_ran_twice_appears_twice() -> None:
    assert main_of(script_of("x = [1]", "x.append(2)", "x.append(2)")).count("x.append(2)") == 2


def test_a_definition_that_ran_again_appears_once() -> None:
    text = script_of("def f(x):\n    return x", "print(f(1))", "def f(x):\n    return x", "print(f(2))")
    assert text.count("def f(x)") == 1
    assert text.index("def f(x)") < text.index("def main()")


def test_a_function_with_two_versions_stays_in_order() -> None:
    body = main_of(script_of("def f():\n    return 1", "print(f())", "def f():\n    return 2", "print(f())"))
    assert body.startswith("global f\n")
    assert body.count("def f()") == 2


def test_a_version_that_nothing_used_is_a_comment() -> None:
    plan = plan_of("def f():\n    return 1", "def f():\n    return 2", "print(f())")
    assert left_out(plan) == {1: "nothing later reads this f"}


def test_a_cell_that_only_shows_a_value_is_a_comment() -> None:
    plan = plan_of("x = [1]", "x", "print(x)")
    assert left_out(plan) == {2: "it only shows values"}


def test_an_unread_assignment_is_a_comment_unless_a_result() -> None:
    assert left_out(plan_of("x = 1", "y = 2", "print(x)")) == {2: "nothing later reads this y"}
    assert left_out(plan_of("x = 1", "y = 2", "print(x)", results=frozenset({"y"}))) == {}


@pytest.mark.parametrize(
    "code", ["x = f()", "x[0] = 1", "x += y", "import thing", "del y", "x = [i for i in loader]", "x = y[0]", "x = y.z"]
)
def test_a_cell_stays_if_it_may_have_an_effect(code: str) -> None:
    assert left_out(plan_of("x = y = f = loader = print", code, results=frozenset({"f"}))) == {}


def test_a_variable_that_only_a_function_reads_stays() -> None:
    assert left_out(plan_of("rate = 0.1", "def f():\n    return rate", "print(f())")) == {}


@pytest.mark.parametrize("code", ["cProfile.run('fit(limit)')", "d.query('loss > @limit')", "d.query(f'{a} > @limit')"])
def test_a_variable_that_a_string_mentions_stays(code: str) -> None:
    assert left_out(plan_of("limit = 3", "cProfile = d = a = print", code)) == {}


def test_words_of_a_string_may_be_names_of_the_script() -> None:
    assert refusals_of("print('pulled and copied by show_results')", numbers=frozenset({1})) == []


@pytest.mark.parametrize(
    ("body", "is_read"),
    [
        ("lr = lr", True),
        ("lr += 1", True),
        ("m = 2 * lr\n    lr = m", True),
        ("def lr(self, x=lr):\n        return x", True),
        ("if True:\n        lr = 1\n    m = lr", True),
        ("lr: float = 2\n    m = lr", False),
        ("@property\n    def lr(self):\n        return 1\n    @lr.setter\n    def lr(self, x):\n        pass", False),
        ("m = [lr for lr in range(3)]", False),
    ],
)
def test_a_class_may_read_a_variable_before_its_own(body: str, is_read: bool) -> None:
    plan = plan_of("lr = 0.1", f"class A:\n    {body}", "print(A)")
    assert left_out(plan) == ({} if is_read else {1: "nothing later reads this lr"})
    assert plan.refusals == []


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("modle", "NameError: name 'modle' is not defined"),
        ("x = = 2", "SyntaxError: invalid syntax"),
        ("1 / (rank - 2)", "ZeroDivisionError: division by zero"),
        ("import sys\nimport missing", "ModuleNotFoundError: No module named 'missing'"),
    ],
)
def test_a_failed_cell_without_an_effect_is_a_comment(code: str, failure: str) -> None:
    plan = plan_of("import sys\nx = 1", Execution(2, code, EVERYONE, failure), "print(x)")
    assert (left_out(plan), plan.refusals) == ({2: f"it failed: {failure}"}, [])


@pytest.mark.parametrize(
    "code",
    [
        "x = 2\nmodle",
        "f(1 / 0)",
        "import missing_too\nimport missing",
        "import json\nmodle",
        "def f():\n    pass\nmodle",
    ],
)
def test_a_failed_cell_with_an_effect_is_refused(code: str) -> None:
    failed = Execution(2, code, EVERYONE, "ModuleNotFoundError: No module named 'missing'")
    (refusal,) = plan_of("x = 1\ndef f():\n    return x", failed, "print(x, f())").refusals
    assert refusal.text.startswith("cell 2: it failed (ModuleNotFoundError: No module named 'missing') and may have")
    assert refusal.is_doubt


def test_a_cell_that_never_began_is_a_comment() -> None:
    failed = Execution(2, "x.append(2)", EVERYONE, "it did not run", never_began=True)
    assert refusals_of("x = [1]", failed, "print(x)") == []


def test_cells_at_the_same_time_are_refused() -> None:
    cell = Execution(2, "x.append(2)", (0,), overlaps=3)
    assert refusals_of("x = [1]", cell, "print(x)") == ["cell 2: it ran at the same time as cell 3"]


def test_reasons_of_the_session_are_refused() -> None:
    session = Session((5,), app="fastai", problems=("a",), doubts=("b",))
    refusals = selection.plan_script(session, Choice()).refusals
    assert [(refusal.text, refusal.is_doubt) for refusal in refusals] == [
        ("a", False),
        ("b", True),
    ]


@pytest.mark.parametrize(
    ("app", "code", "is_imported"),
    [
        ("fastai", "learn.fit(1)", True),
        ("lightning", "fit()", True),
        ("hf", "trainer.train()", False),
        ("hf", "load(device_map='auto')", True),
        (None, "train()", False),
    ],
)
def test_the_script_imports_the_app_that_its_cells_need(app: str | None, code: str, is_imported: bool) -> None:
    cells = (Execution(2, f"import helpers\nhelpers.{code}", EVERYONE), Execution(3, "helpers.load()", (1,)))
    session = Session((5, 6), app=app, events=cells)
    choice = Choice()
    plan = selection.plan_script(session, choice)
    assert plan.refusals == []
    text = script.write_script(plan, session, choice, "x.py")
    assert (f'use_app("{app}", device)' in text) == is_imported
    assert ("# cell 2\n    begin_cell(2)\n" in text) == is_imported
    assert ("if rank == 1:\n        begin_cell(3, (1,))\n" in text) == is_imported


def test_an_app_is_notified_of_each_change_of_ranks_in_a_cell() -> None:
    cells = [Execution(2, "import h\nh.a()", EVERYONE), Execution(2, "h.b()", (0,)), Execution(2, "h.c()", EVERYONE)]
    session = Session((5, 6), app="fastai", events=tuple(cells))
    choice = Choice()
    body = main_of(script.write_script(selection.plan_script(session, choice), session, choice, "x.py"))
    assert re.findall(r"begin_cell\(.*\)", body) == [
        "begin_cell(2)",
        "begin_cell(2, (0,), part=2)",
        "begin_cell(2, (), part=3)",
    ]


@pytest.mark.parametrize("code", ["def f():\n    import ddip", "x = ddip", "if x:\n    import ddip"])
def test_ddip_is_refused_elsewhere_than_at_a_save_point(code: str) -> None:
    assert any("ddip's functions" in refusal for refusal in refusals_of("import ddip\nx = 1", code))


def test_import_star_imports_the_names_in_use() -> None:
    names = {"rand": "", "zeros": "", "np": "numpy", "nn": "torch.nn", "math": "math", "rank": ""}
    cells = (Execution(1, "from torch import *", EVERYONE), Execution(2, "print(rand(2), np.pi, math.pi)", EVERYONE))
    session = Session((5, 6), events=cells, exports={"torch": names})
    plan = selection.plan_script(session, Choice())
    assert plan.refusals == []
    imports = [step.statement.text for step in plan.steps if step.number == 1]
    assert imports == ["import math", "import numpy as np", "from torch import rand"]
    cells = (Execution(1, "from a.b import *", EVERYONE), Execution(2, "print(np.pi)", EVERYONE))
    plan = selection.plan_script(Session((5, 6), events=cells, exports={"a.b": {"np": "numpy"}}), Choice())
    imports = [step.statement.text for step in plan.steps if step.number == 1]
    assert imports == ["import numpy as np", "__import__('a.b')"]


def test_import_star_of_an_unknown_module_is_refused() -> None:
    assert refusals_of("from missing import *", "print(x)")[0].endswith("not * from missing")


def test_save_points_do_nothing_in_a_script() -> None:
    text = script_of("import ddip\nfor step in range(3):\n    ddip.save_point()")
    assert "ddip = type('ddip'" in text
    assert refusals_of("import ddip\nddip.dist_state()")[0].endswith("ddip's functions work only in cells")


def test_chosen_cells_only() -> None:
    plan = plan_of("x = 1", "print(x)", "print(x, x)", numbers=frozenset({1, 3}))
    assert {step.number for step in plan.steps} == {1, 3}


def test_last_takes_a_cell_once() -> None:
    plan = plan_of("x = [1]", "x.append(1)", "x.append(1)", "print(x)", last=True)
    assert [step.number for step in plan.steps] == [1, 3, 4]


# -- imports, definitions, main


def test_imports_and_definitions_precede_main() -> None:
    text = script_of(
        "import math\ny = math.pi", "from json import dumps\n\ndef f():\n    return dumps(y)", "print(f())"
    )
    assert (
        text.index("import math") < text.index("from json import dumps") < text.index("def f") < text.index("def main")
    )


def test_an_import_after_a_change_of_the_environment_stays() -> None:
    body = main_of(script_of("import os\nos.environ['A'] = 'b'\nimport json\nprint(json)"))
    assert "import json" in body


@pytest.mark.parametrize(
    "definition",
    [
        "def f(x=y):\n    return x",
        "class f(y.__class__):\n    pass",
        "@y\ndef f():\n    pass",
        "class f:\n    made = print(1)",
        "@register\ndef f():\n    pass",
        "def f(group=dist.group.WORLD):\n    pass",
        "class f:\n    group: object = dist.group.WORLD",
        "class f:\n    y = y",
    ],
)
def test_a_definition_that_reads_a_variable_stays_in_place(definition: str) -> None:
    body = main_of(script_of("import torch.distributed as dist\ny = register = print", definition, "print(f)"))
    assert definition in body
    assert body.startswith("global f")


@pytest.mark.parametrize(
    "definition",
    ["def f(x=torch.nn.ReLU, y=math.pi):\n    pass", "class f(torch.nn.Module):\n    x: torch.distributed.Work = None"],
)
def test_a_definition_with_constants_of_modules_moves(definition: str) -> None:
    text = script_of("import math, torch", definition, "print(f)")
    assert text.index(definition) < text.index("def main")


def test_a_name_of_python_keeps_its_meaning_before() -> None:
    body = main_of(script_of("print(sum([1]))", "def sum(x):\n    return 0", "print(sum([1]))"))
    assert "def sum" in body
    assert body.startswith("global sum\n")


def test_a_definition_of_some_ranks_stays_there() -> None:
    assert "if rank == 0:\n    def f():" in main_of(script_of(("def f():\n    return 1\nf()", (0,))))


def test_an_import_that_may_have_an_effect_stays_in_order() -> None:
    body = main_of(script_of("import torch\ntorch.rand(1)", "import helpers\nhelpers"))
    assert body.index("torch.rand(1)") < body.index("import helpers")


def test_a_cell_on_some_ranks_is_guarded() -> None:
    assert "if rank == 1:\n    x = 1\n    print(x)" in main_of(script_of(("x = 1\nprint(x)", (1,))))


def test_cells_begin_after_the_former_ended_on_all_ranks() -> None:
    text = script_of(("open('x', 'w').close()", (0,)), "n = 1", "print(open('x').read(), n)")
    assert "    open('x', 'w').close()\nend_cell()\n\n# cell 2\nn = 1\n\n# cell 3\nprint(" in main_of(text)
    assert "    torch.distributed.barrier(cell_group)\n" in text
    assert text.index("cell_group = torch.distributed.new_group(") < text.index("    main()\n")


@pytest.mark.parametrize(
    "cells",
    [
        ["x = 1\ny = 2", "print(x, y)"],
        ["import json", "print(json)"],
        ["print(1)\nprint(2)"],
        [Execution(1, "serve()", (0,), overlaps=2), Execution(2, "ask()", (1,), overlaps=1)],
    ],
)
def test_no_rank_waits_between_cells_that_need_no_order(cells: list[Cell]) -> None:
    session, choice = session_of("serve = ask = print", *cells), Choice()
    text = script.write_script(selection.plan_script(session, choice), session, choice, "train.py")
    assert "end_cell" not in text
    assert "cell_group" not in text


def test_one_rank_waits_for_none() -> None:
    session = Session((5,), events=(Execution(1, "print(1)", (0,)), Execution(2, "print(2)", (0,))))
    choice = Choice()
    assert "end_cell" not in script.write_script(selection.plan_script(session, choice), session, choice, "train.py")


def test_figures_are_closed_as_in_the_notebook() -> None:
    code = "import matplotlib.pyplot as plt", "plt.plot([1])", "plt.plot([2])\nplt.show()"
    text = script_of("x = 1", *code, ("%dipull x\nplt.plot(x)", IN_NOTEBOOK))
    assert "plt.plot([1])\nend_cell()\n\n# cell 4\nplt.plot([2])" in main_of(text)
    assert 'sys.modules["matplotlib.pyplot"].close("all")' in text
    assert "matplotlib.pyplot.show = show_and_close" in text
    assert text.partition("def end_cell()")[2].partition("def ")[0].count("close_figures()") == 1
    session = Session((5,), events=tuple(Execution(n, cell, (0,)) for n, cell in enumerate(code, 1)))
    alone = script.write_script(selection.plan_script(session, Choice()), session, Choice(), "train.py")
    assert "plt.plot([1])\nend_cell()\n" in main_of(alone)
    assert "barrier" not in alone


def test_figures_of_the_shown_code_begin_empty() -> None:
    cells = ("x = 1", ("import seaborn\n%dipull x\nseaborn.lineplot(x)", IN_NOTEBOOK))
    text = script_of(*cells)
    assert "# cell 2 of the notebook\n    close_figures()\n" in text


@pytest.mark.parametrize("code", ["%config InlineBackend.close_figures = False", "plt.ioff()", "%matplotlib widget"])
def test_figures_that_the_notebook_kept_stay(code: str) -> None:
    text = script_of("import matplotlib.pyplot as plt", code, "plt.plot([1])", "plt.plot([2])")
    assert "close_figures()" not in text


def test_a_group_that_a_cell_destroys_stays() -> None:
    code = "import torch.distributed as dist\nfrom torch.distributed import destroy_process_group as leave"
    text = script_of(code, "dist.destroy_process_group()", "print(dist.get_rank())")
    assert "torch.distributed.destroy_process_group = leave_subgroup" in text
    assert "from torch.distributed import destroy_process_group as leave" in main_of(text)
    namespace: dict[str, object] = {"end_rank": types.SimpleNamespace(), "torch": torch}
    left: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "destroy_process_group", left.append)
        exec("if True:\n" + script.STAY, namespace)
        torch.distributed.destroy_process_group()
        torch.distributed.destroy_process_group("a group")  # type: ignore[arg-type]
        assert left == ["a group"]


def test_strings_keep_their_lines() -> None:
    assert 'print("""a\n  b""")' in script_of('print("""a\n  b""")')


def test_a_user_function_named_main_keeps_its_name() -> None:
    text = script_of("def main():\n    return 1", "print(main())")
    assert "def run_cells() -> None:" in text
    assert "    run_cells()\n" in text


def test_parameters_become_options() -> None:
    cell = Execution(1, "lr: float = 0.1\nname = 'a'\nfast = True\nsizes = [1]", EVERYONE, is_param=True)
    text = script_of(cell, "print(lr, name, fast, sizes)")
    assert "parser.add_argument('--lr', dest='lr', type=float, default=0.1)" in text
    assert "parser.add_argument('--fast', dest='fast', action=argparse.BooleanOptionalAction, default=True)" in text
    chosen = [f"{name} = session_options.{name}" for name in ("lr", "name", "fast")]
    assert "\n".join([*chosen, "sizes = [1]"]) in main_of(text)


# -- pushes and pulls


def test_a_small_pushed_value_becomes_a_literal() -> None:
    text = script_of(push_of(1, x=[1.0, "a"], n=3), "print(x, n)", push_of(3, (1,), n=4), "print(n)")
    assert "# cell 1\nx = [1.0, 'a']\nn = 3" in main_of(text)
    assert "# cell 3 on rank 1\nif rank == 1:\n    n = 4" in main_of(text)


SHARED: list[int] = [1]


def _double(x: int) -> int:
    return 2 * x


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.ones(2), "its value cannot be written as Python code; --data stores it in a file beside the script"),
        ([0] * 100, "its value cannot be written as Python code; --data stores it in a file beside the script"),
        ([SHARED, SHARED], "its value cannot be written as Python code; --data stores it in a file beside the script"),
        (torch.nn.Linear(1, 1), "it contains a module or optimizer; create it in a %%dip cell"),
        (lambda x: x, "it contains code of the notebook; create it in a %%dip cell"),
    ],
)
def test_another_pushed_value_is_refused(value: object, why: str) -> None:
    assert refusals_of(push_of(1, x=value), "print(x)") == [f"cell 1: %dipush x: {why}"]


def test_a_push_that_was_too_large_is_refused() -> None:
    why = "it is too large, or cannot be pickled; create it in a %%dip cell"
    assert refusals_of(Push(1, ("x",), EVERYONE), "print(x)", stores_data=True) == [f"cell 1: %dipush x: {why}"]


def test_a_push_may_come_from_a_file() -> None:
    plan = plan_of(push_of(1, x=torch.ones(2), y=1), "print(x)", stores_data=True)
    assert (plan.refusals, len(plan.data)) == ([], 1)
    assert plan.steps[0].statement.text == "x, y = pushed_values(0)"


def test_code_for_pulled_values_runs_on_rank_0_last() -> None:
    text = script_of(
        "x = [1]",
        ("import math\n%dipull x\n%dipull -r all x as all_x", IN_NOTEBOOK),
        ("print(math.pi, x, all_x)", IN_NOTEBOOK),
        "x.append(2)",
    )
    assert "if rank == 0:\n    pulled.append((copied(x),))\n\npulled.append((from_ranks(x),))" in main_of(text)
    shown = text.partition("def show_results")[2].partition("def main")[0]
    assert "(x,) = pulled[0]\n    (all_x,) = pulled[1]" in shown
    assert "print(math.pi, x, all_x)" in shown


def test_display_of_a_pulled_value_prints_it() -> None:
    text = script_of("x = [1]", ("%dipull x\ndisplay(x)", IN_NOTEBOOK))
    assert text.count("def display(") == 1
    assert "    display(x)" in text.partition("def show_results")[2]


@pytest.mark.parametrize(
    "code", ["x = mine", "x = 3", "x[0] = mine", "%dipull --now x", "x, y = mine, 2", "def x(): pass"]
)
def test_a_pulled_value_that_other_code_changes_is_unknown(code: str) -> None:
    plan = plan_of("x = [1]", ("%dipull x", IN_NOTEBOOK), (code, IN_NOTEBOOK), ("print(x)", IN_NOTEBOOK))
    assert [number for number, _ in plan.shown] == [2]
    failed = Execution(3, "x = 2\n1 / 0", None, "it failed")
    assert len(plan_of("x = [1]", ("%dipull x", IN_NOTEBOOK), failed, ("print(x)", IN_NOTEBOOK)).shown) == 1


@pytest.mark.parametrize(
    "code", ["%dipull --now x\nprint(x)", "%dipull x\nprint(x, mine)", "%dipull -r 1 x", "y = %dipull x"]
)
def test_other_code_for_pulled_values_is_a_comment(code: str) -> None:
    plan = plan_of("x = [1]", (code, IN_NOTEBOOK), "print(x)")
    assert (plan.refusals, plan.shown) == ([], [])


# -- what was typed


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os = 1\nprint(os)", "the script uses the module os itself; give your variable another name"),
        ("import json as torch", "the script uses the module torch itself; give your variable another name"),
        ("import numpy as np\ng = np.random.default_rng(None)", "default_rng() draws from the system's entropy"),
        ("from numpy.random import default_rng as new", "new is default_rng, which may draw from the system's entropy"),
        ("import torch\ntorch.manual_seed(hash('a'))", "hash() of text differs in each process"),
        ("d = {'a': 1}\nx = list(d.keys() & d.keys())", "the order of a set of keys may differ between processes"),
        ("here = %pwd", "%pwd"),
        ("%time a = 1; print(a)", "%time a = 1; print(a)"),
    ],
)
def test_code_that_may_differ_is_refused(code: str, reason: str) -> None:
    assert any(reason in refusal for refusal in refusals_of(code))


def test_a_value_pulled_and_pushed_in_one_cell_becomes_comment() -> None:
    plan = plan_of("x = 1", ("%dipull x\nprint(x)\nx = 2\n%dipush x", IN_NOTEBOOK), push_of(2, x=2), "print(x)")
    assert (plan.refusals, plan.shown) == ([], [])


def test_a_pull_before_the_start_is_left_out() -> None:
    former = Execution(1, "%dipull w\nprint(w)", is_former=True)
    plan = plan_of(former, "x = 1", "print(x)")
    assert (plan.refusals, plan.shown) == ([], [])


def test_pushed_tensors_keep_their_shared_memory() -> None:
    base = torch.zeros(3)
    text = script_of(push_of(1, base=base, view=base[1:]), "base += 1", "a = view.sum().item()", stores_data=True)
    assert "pushed_values(0)" in text
    sent = executions._pickle_again(pickling.dump_all({"base": base, "view": base[1:]}).pickled)
    assert sent is not None
    loaded, refused = selection._load_push(sent)
    loaded["base"] += 1
    assert (loaded["view"].tolist(), refused) == ([1.0, 1.0], "")


def test_a_pushed_value_that_cannot_be_saved_is_none() -> None:
    assert executions._pickle_again(None) is None
    broken = pickling.dump_all({"x": [1]}).pickled
    assert executions._pickle_again({name: type(value)([value.parts[0][:2]]) for name, value in broken.items()}) is None


def test_a_problem_is_written_with_partial() -> None:
    text = script_of("x = 1", "%run other.py", partial=True)
    assert "raise NotImplementedError('cell 2: %run other.py')" in text


@pytest.mark.parametrize(("typed", "numbers"), [("3", {3}), ("3-5,12", {3, 4, 5, 12}), ("18-", {18, 19})])
def test_numbers_of_cells(typed: str, numbers: set[int]) -> None:
    assert executions.parse_numbers(typed, 19) == numbers


# -- equal values

EQUAL = {
    "a function that reads a variable": ["a = 1\ndef f():\n    return a", "b = f()", "a = 2", "c = f() + b"],
    "definitions in another order": ["def f():\n    return g()", "def g():\n    return 1", "a = f()"],
    "a function with two versions": ["def f():\n    return 1", "a = f()", "def f():\n    return 2", "b = f()"],
    "a function that ran again after an attribute": [
        "def f():\n    return f.n\nf.n = 1",
        "a = f()",
        "def f():\n    return f.n",
        "try:\n    b = f()\nexcept AttributeError:\n    b = 0",
    ],
    "a class defined again": ["class A:\n    n = []", "A.n.append(1)", "class A:\n    n = []", "a = len(A.n)"],
    "a patched class": ["import torch", "torch.nn.Base = dict", "class A(torch.nn.Base):\n    pass", "a = len(A(b=1))"],
    "a deleted variable": ["a = 1", "del a", "try:\n    a\nexcept NameError:\n    b = 2"],
    "a builtin replaced": ["a = sum([1, 2])", "def sum(x):\n    return 0", "b = sum([1, 2])"],
    "a generator": ["g = iter(range(9))\nnext(g)", "a = next(g)", "a += next(g)"],
    "global in a function": ["def f():\n    global n\n    n = 5", "f()", "a = n"],
    "a lambda in a loop": [
        "fs = [lambda: i for i in range(3)]",
        "a = [f() for f in fs]",
        "for i in range(2):\n    h = lambda: i",
        "i = 9\nb = h()",
    ],
    "a seed in a function": [
        "import torch",
        "def make():\n    torch.manual_seed(3)\n    return torch.rand(1).item()",
        "a = torch.rand(1).item()",
        "b = make() + torch.rand(1).item()",
    ],
    "random numbers without a seed": [
        "import random, torch\nimport numpy as np",
        "a = random.random() + np.random.rand()",
        "b = torch.rand(1).item()",
    ],
    "an item that draws": [
        "import torch\nclass Data:\n    def __getitem__(self, i):\n        return torch.rand(1).item()",
        "d = Data()",
        "d[0]",
        "a = torch.rand(1).item()",
    ],
    "a property that draws": [
        "import torch\nclass Data:\n    @property\n    def x(self):\n        return torch.rand(1).item()",
        "d = Data()",
        "e = d.x",
        "a = torch.rand(1).item()",
    ],
    "a default that is read once": ["n = 1", "def f(x=n):\n    return x", "n = 2", "a = f()"],
    "an import by another name": ["import json as sys", "a = sys.dumps([1])"],
    "a module replaced": ["import math", "a = math.pi", "class math:\n    pi = 3", "b = math.pi"],
    "registration of subclasses": [
        "seen = []\nclass Base:\n    def __init_subclass__(cls):\n        seen.append(cls.__name__)",
        "seen.clear()\nclass A(Base):\n    pass",
        "a = len(seen)",
    ],
    "names of the script": ["contextlib = 2\nrandom = 3", "a = contextlib + random"],
    "a generator that reads late": ["k = 1", "g = (x * k for x in range(3))", "k = 10", "a = list(g)"],
    "a variable beside a comprehension": [
        "x = [1, 2]",
        "a = [x for x in x]",
        "b = len(x)",
        "x = [3]",
        "c = sum(x for x in x)",
    ],
    "a walrus in a comprehension": ["[y := i for i in range(3)]", "def f():\n    return y", "a = f()"],
    "a sum within a function": ["def f():\n    total = 0\n    total += 2\n    return total", "a = f()"],
    "rank assigned": ["rank = 0", "a = rank"],
    "a form feed in a string": ['s = """1 2\f3\u2028 4"""', "a = len(s)"],
    "an annotated variable": ["a: int = 1\na += 1"],
    "an annotation that names a class": [
        "class A:\n    n = 2",
        "def f(x: 'A'):\n    import typing\n    return typing.get_type_hints(f)['x'].n",
        "a = f(1)",
    ],
    "a comprehension in a class": ["n = 2", "class A:\n    m = [n for _ in range(2)]", "a = A.m"],
    "a function that changes another's variable": ["n = [1]", "def f():\n    n.append(len(n))", "f()\nf()", "a = n"],
    "a cell that ran twice": ["a = [1]", "a.append(len(a))", "a.append(len(a))"],
    "a name in a string": ["import sys\nvalue = 4", "a = getattr(sys.modules['__main__'], 'value', 4)"],
    "an exception variable": ["try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    a = str(e)"],
    "nested functions": [
        "n = 1",
        "def f():\n    def g():\n        return n\n    return g",
        "g = f()",
        "n = 7",
        "a = g()",
    ],
    "a recursive function": [
        "def f(n):\n    return 1 if n < 2 else n * f(n - 1)",
        "a = f(5)",
        "def f(n):\n    return 0",
        "b = f(5)",
    ],
    "a guard": ["if __name__ == '__main__':\n    a = 3"],
    "a set of numbers": ["a = [x for x in {3, 1, 2}]"],
    "a class that reads a variable of its own name": ["n = 2", "class A:\n    n = n", "a = A.n"],
}
"""Sessions of one rank, whose scripts give the same values."""


def values_of(code: list[str]) -> dict[str, object]:
    """Run code in a namespace as IPython does; return its plain values."""
    module = types.ModuleType("__main__")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", module)
        for cell in code:
            exec(compile(cell, "<cell>", "exec", dont_inherit=True), vars(module))
    return {name: value for name, value in vars(module).items() if len(name) == 1 and isinstance(value, PLAIN)}


PLAIN = (int, float, str, list)


@pytest.mark.parametrize("case", EQUAL)
def test_the_script_gives_equal_values(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(torch.distributed, name, lambda *arguments, **options: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.nn, "Base", object, raising=False)
    seeding = """import random, torch, numpy
rank = 0
for m in (random.seed, torch.manual_seed, numpy.random.seed):
    m(5)
del random, torch, numpy, m"""
    expected = values_of([seeding, *EQUAL[case]])
    cells = [Execution(number, code, (0,)) for number, code in enumerate(EQUAL[case], 1)]
    session = Session(seeds=(5,), events=tuple(cells))
    monkeypatch.setattr(torch.nn, "Base", object, raising=False)
    plan = selection.plan_script(session, Choice(results=frozenset(expected)))
    if not plan.refusals:
        found = values_of([script.write_script(plan, session, Choice(), "train.py")])
        assert {name: found.get(name) for name in expected} == expected
    assert bool(plan.refusals) == (case in REFUSED)


REFUSED: set[str] = set()
"""Cases that ddip refuses, although a script could give the same values."""


# -- the record of the session


class _History(list[SimpleNamespace]):
    started, sent = 0.0, ()


@pytest.mark.parametrize(
    ("code", "folder", "is_refused"),
    [
        ("x = 1", "", False),
        ("x = 1", "sub", True),
        ("%cd sub", "sub", False),
        ("%cd sub", "", True),
        ("import os; os.chdir('sub')", "sub", True),
    ],
)
def test_a_script_of_another_folder_is_refused(code: str, folder: str, is_refused: bool, tmp_path: Path) -> None:
    for file in (tmp_path / "first.py", tmp_path / "sub" / "first.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("x = 1")
    digest = hashlib.sha256(b"x = 1").hexdigest()
    common = {"submitted": 1.0, "began": 1.0, "ended": 1.0, "outcome": "ok", "ranks": [0, 1]}
    history = _History(
        [
            SimpleNamespace(number=1, code=code, script=None, **common),
            SimpleNamespace(
                number=2, code="%diprun first.py", script={"folder": f"{tmp_path / folder}", "digest": digest}, **common
            ),
        ]
    )
    shell = SimpleNamespace(
        events=SimpleNamespace(register=lambda *arguments: None),
        history_manager=SimpleNamespace(input_hist_raw=["", f"%%dip\n{code}", "%diprun first.py"]),
    )
    (*_, ran) = executions.Executions(shell).list_events(history, f"{tmp_path}")  # type: ignore[arg-type]
    assert isinstance(ran, Execution)
    (statement,) = translation.translate_cell(ran.code)
    assert statement.problem.startswith("%diprun first.py: the file is in the notebook's folder") == is_refused


def test_a_history_that_has_dropped_cells_is_cut() -> None:
    history = History()
    done: Future[None] = Future()
    done.set_result(None)
    history.begin_session()
    for _ in range(KEPT):
        history.add(SimpleNamespace(submitted=time.time(), done=done))  # type: ignore[arg-type]
    assert not history.is_cut
    history.add(SimpleNamespace(submitted=time.time(), done=done))  # type: ignore[arg-type]
    assert history.is_cut
    history.begin_session()
    assert not history.is_cut


def test_a_push_is_kept_up_to_a_limit() -> None:
    history, value = History(keep_pushes=True), torch.ones(2)
    history.note_push(3, pickling.dump_all({"x": value}).pickled, range(2))
    value += 1
    history.note_push(4, pickling.dump_all({"x": bytearray(SENT_BYTES)}).pickled, [1])
    first, second = history.sent
    assert (first.number, first.names, first.ranks, second.ranks, second.pickled) == (3, ("x",), (0, 1), (1,), None)
    assert first.pickled is not None
    assert first.pickled["x"].load().tolist() == [1, 1]


NAN = float("nan")


@pytest.mark.parametrize(
    ("ours", "theirs", "differs"),
    [
        (1.0, NAN, True),
        (NAN, NAN, False),
        (1, 1.0, True),
        (float("inf"), float("inf"), False),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), False),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), True),
        (torch.tensor([1j]), torch.tensor([2j]), True),
        (torch.tensor([1j]).to(torch.complex128), torch.tensor([1j]) + 1e-9, True),
        (torch.tensor([1j]).to(torch.complex128), torch.tensor([1j]).to(torch.complex128) + 1e-9, False),
        (1e-7, 9e-7, True),
        (1e3, 1e3 + 1e-4, False),
        (torch.tensor([0.0, 1e-7]), torch.tensor([0.0, 9e-7]), True),
        (torch.tensor([1e3, 0.0]), torch.tensor([1e3, 1e-4]), False),
        (torch.tensor([float("inf")]), torch.tensor([-float("inf")]), True),
        (torch.ones(2), torch.ones(1), True),
        (torch.ones(1), torch.ones(1, dtype=torch.float64), True),
        ([1, 2], [1], True),
        ("a", "b", True),
        (numpy.float64(1), numpy.float64(2), True),
    ],
)
def test_values_are_compared_strictly(ours: object, theirs: object, differs: bool) -> None:
    packed = [values.pack_values({"x": value}, ["x"]) for value in (ours, theirs)]
    assert [refused for _, refused in packed] == [{}, {}]
    found = values.compare_values(packed[0][0], packed[1][0]).values()
    assert any(isinstance(difference, str) or not difference <= check.TOLERANCE for difference in found) == differs


def test_a_batch_script_has_the_shape_and_options() -> None:
    shape = JobShape((4, 4), True, 2, {"nodes": "2-4", "time": "2:00:00", "exclusive": ""}, "module load cuda")
    lines = job_files.write_slurm_file(shape, Path("train.py")).splitlines()
    assert {line for line in lines if line.startswith("#SBATCH")} == {
        "#SBATCH --job-name=train",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --time=2:00:00",
        "#SBATCH --exclusive",
    }
    assert "module load cuda" in lines


def test_a_manifest_starts_one_torchrun_on_each_host() -> None:
    yaml = pytest.importorskip("yaml", reason="the manifest is read with PyYAML")
    text = job_files.write_kubernetes_file(JobShape((4, 4), True, 2, {}), Path("my_train.py"), "my_train.data.pickle")
    service, job = yaml.safe_load_all(text)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    assert pod["subdomain"] == service["metadata"]["name"] == "run-my-train"
    assert container["command"][1:7] == [
        "--nnodes",
        "2",
        "--node-rank",
        "$(JOB_COMPLETION_INDEX)",
        "--nproc-per-node",
        "4",
    ]
    assert container["command"][-1] == "/scripts/my_train.py"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    assert "--from-file=my_train.py --from-file=my_train.data.pickle" in text


def test_the_name_of_a_job_is_one_of_kubernetes() -> None:
    text = job_files.write_kubernetes_file(JobShape((1,), False, 1, {}), Path(f"1{'a' * 44}_bc.py"), "")
    assert f'name: "run-1{"a" * 44}"\n' in text


@pytest.mark.parametrize(("ranks", "name"), [((4, 3), "train.py"), ((4, 4), "my train.py"), ((4, 4), "$x.py")])
def test_a_job_file_that_could_not_run_is_refused(ranks: tuple[int, ...], name: str) -> None:
    for write in (job_files.write_slurm_file, lambda shape, script: job_files.write_kubernetes_file(shape, script, "")):
        with pytest.raises(BadInput):
            write(JobShape(ranks, False, 1, {}), Path(name))
