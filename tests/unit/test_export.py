"""A session as a script: translation, the choice of cells, and the order of the text. No processes."""

from __future__ import annotations

import pytest

from ddip.export import script, selection, translation
from ddip.export.record import Choice, Execution, Session
from ddip.export.selection import LeftOut, Plan
from ddip.notebook import executions

EVERYONE = (0, 1)
IN_NOTEBOOK = None


def session_of(*cells: str | tuple[str, tuple[int, ...] | None] | Execution) -> Session:
    """Return a session of two ranks that ran these cells; a string is a cell on both ranks."""
    found = []
    for number, cell in enumerate(cells, 1):
        code, ranks = (cell, EVERYONE) if isinstance(cell, str) else cell if isinstance(cell, tuple) else ("", None)
        found.append(cell if isinstance(cell, Execution) else Execution(number, code, ranks))
    return Session(seeds=(5, 6), executions=tuple(found))


def plan_of(*cells: str | tuple[str, tuple[int, ...] | None] | Execution, **choice: object) -> Plan:
    return selection.plan_script(session_of(*cells), Choice(**choice))  # type: ignore[arg-type]


def script_of(*cells: str | tuple[str, tuple[int, ...] | None] | Execution, **choice: object) -> str:
    """Return the script's text, which must be valid Python."""
    session, chosen = session_of(*cells), Choice(**choice)  # type: ignore[arg-type]
    plan = selection.plan_script(session, chosen)
    assert plan.problems == []
    text = script.write_script(plan, session, chosen, "train.py")
    compile(text, "train.py", "exec")
    return text


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
        ("!echo {n} > a.txt", "subprocess.run(f'echo {n} > a.txt', shell=True)"),
        (
            "files = !ls",
            "files = subprocess.run('ls', shell=True, capture_output=True, text=True).stdout.splitlines()",
        ),
        ("%cd data", "os.chdir('data')"),
        ("%env A=b", "os.environ['A'] = 'b'"),
        ("%set_env A b c", "os.environ['A'] = 'b c'"),
        ("%time fit(3)", "fit(3)"),
        ("%timeit -n 10 -r 2 fit(3)", "[(fit(3)) for _ in range(20)]"),
        ("x = await load(1)", "x = asyncio.run(load(1))"),
        ("%matplotlib inline", "# %matplotlib inline"),
        ("%config InlineBackend.rc = {}", "# %config InlineBackend.rc = {}"),
        ("model?", "# %pinfo model"),
        ("if n:\n    !touch x", "if n:\n    subprocess.run('touch x', shell=True)"),
        ("x;  # no output", "x  # no output"),
    ],
)
def test_a_line_becomes_plain_python(typed: str, plain: str) -> None:
    (statement,) = translation.translate_cell(typed)
    assert (statement.text, statement.problem) == (plain, "")


@pytest.mark.parametrize(
    "typed",
    [
        "%run other.py",
        "%%bash\nls",
        "!echo $HOME",
        "%timeit fit(3)",
        "get_ipython().ask_exit()",
        "async for x in y:\n    print(x)",
        "%env A=$B",
    ],
)
def test_a_line_without_a_translation_is_named(typed: str) -> None:
    (statement,) = translation.translate_cell(typed)
    assert statement.problem == typed.partition("\n")[0]


def test_the_body_of_a_timed_cell_stays() -> None:
    assert [one.text for one in translation.translate_cell("%%time\nx = 1\ny = 2")] == ["# %%time", "x = 1", "y = 2"]


def test_statements_keep_their_comments_and_strings() -> None:
    code = '# above\nx = """a\n  b"""  # beside\n\n@wrap\ndef f():\n    return 1'
    assert [one.text for one in translation.translate_cell(code)] == [
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
    assert left_out(plan) == {1: "cell 2 assigns f again before anything reads it"}


def test_a_cell_that_only_shows_a_value_is_a_comment() -> None:
    plan = plan_of("x = [1]", "x[0], len(x)", "print(x)")
    assert left_out(plan) == {2: "it only shows values"}


def test_an_unread_assignment_is_a_comment_unless_it_is_a_result() -> None:
    assert left_out(plan_of("x = 1", "y = 2", "print(x)")) == {2: "nothing later reads y"}
    assert left_out(plan_of("x = 1", "y = 2", "print(x)", results=frozenset({"y"}))) == {}


@pytest.mark.parametrize("code", ["x = f()", "x[0] = 1", "x += y", "import thing", "del y", "x = [i for i in loader]"])
def test_a_cell_stays_if_it_may_have_an_effect(code: str) -> None:
    assert left_out(plan_of("x = y = f = loader = print", code, results=frozenset({"f"}))) == {}


def test_a_variable_that_only_a_function_reads_stays() -> None:
    assert left_out(plan_of("rate = 0.1", "def f():\n    return rate", "print(f())")) == {}


def test_a_failed_cell_is_a_comment() -> None:
    plan = plan_of("x = 1", Execution(2, "x / 0", EVERYONE, "it failed: ZeroDivisionError"), "print(x)")
    assert left_out(plan) == {2: "it failed: ZeroDivisionError"}
    assert plan.problems == []


def test_a_name_from_a_failed_cell_is_refused() -> None:
    plan = plan_of(Execution(1, "x = f()\nx / 0", EVERYONE, "it failed"), "print(x)")
    assert plan.problems == ["cell 2 reads x, which cell 1, which is left out (it failed) assigns"]


def test_definitions_before_an_error_stay() -> None:
    failed = Execution(1, "import json\ndef f():\n    return json\n\nf() / 0\ndef g(): pass", EVERYONE, "it failed")
    plan = plan_of(failed, "print(f())")
    assert plan.problems == []
    assert [step.statement.text.strip() for step in plan.steps][:2] == ["import json", "def f():\n    return json"]
    assert left_out(plan) == {1: "it failed"}


def test_cells_of_another_number_of_ranks_are_refused() -> None:
    before = Execution(1, "print(1)", EVERYONE, resized="%makedip changed the number of ranks from 4 to 2")
    assert plan_of(before, "print(2)").problems == [
        "%makedip changed the number of ranks from 4 to 2 after cell 1; --cells 2- takes later cells"
    ]


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
    assert "global y" in text


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
    ],
)
def test_a_definition_that_reads_a_variable_stays_in_place(definition: str) -> None:
    body = main_of(script_of("y = print", definition, "print(f)"))
    assert definition in body
    assert "global f" in body


def test_a_name_of_python_keeps_its_meaning_before() -> None:
    body = main_of(script_of("print(sum([1]))", "def sum(x):\n    return 0", "print(sum([1]))"))
    assert "def sum" in body
    assert body.startswith("global sum\n")


def test_a_cell_on_some_ranks_is_guarded() -> None:
    assert "if rank == 1:\n    x = 1\n    print(x)" in main_of(script_of(("x = 1\nprint(x)", (1,))))


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
    assert "lr = options.lr\nname = options.name\nfast = options.fast\nsizes = [1]" in main_of(text)


# -- pushes and pulls


def test_a_push_becomes_the_cells_that_made_the_value() -> None:
    text = script_of(
        ("import json\nunused = 3\nraw = '[1]'", IN_NOTEBOOK),
        ("x = json.loads(raw)\nx.append(2)", IN_NOTEBOOK),
        ("%dipush x", IN_NOTEBOOK),
        "print(x)",
    )
    assert "x = json.loads(raw)\n    x.append(2)" in main_of(text)
    assert "unused" not in text


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ("import random\nx = random.random()", "cell 1 may draw it without a seed"),
        ("exec('x = 1')", "no cell of the notebook assigns x by name"),
        ("%dipull x", "x comes from %dipull"),
        ("%run make.py\nx = get_ipython().user_ns", "cell 1 has no translation"),
    ],
)
def test_a_push_without_known_origin_is_refused(made: str, why: str) -> None:
    plan = plan_of((made, IN_NOTEBOOK), ("%dipush x", IN_NOTEBOOK), "print(x)")
    assert [problem for problem in plan.problems if problem.startswith(f"%dipush x in cell 2: {why}")]


def test_a_push_may_come_from_a_file() -> None:
    plan = plan_of(("x = random()", IN_NOTEBOOK), ("%dipush x", IN_NOTEBOOK), "print(x)", stores_data=True)
    assert (plan.problems, plan.stored) == ([], ["x"])
    assert [step.statement.text for step in plan.steps if not step.pulls and step.statement.node][0] == (
        "x = stored_value('x')"
    )


def test_code_for_pulled_values_runs_on_rank_0() -> None:
    body = main_of(
        script_of("x = [1]", ("%dipull x\n%dipull -r all x as all_x", IN_NOTEBOOK), ("print(x, all_x)", IN_NOTEBOOK))
    )
    assert "all_x = from_ranks(x)" in body
    assert "if rank == 0:\n    with NotebookRandom():\n        print(x, all_x)" in body


def test_one_name_for_two_variables_is_refused() -> None:
    plan = plan_of("x = [1]", ("%dipull -r all x", IN_NOTEBOOK), ("print(x)", IN_NOTEBOOK), "x.append(2)")
    (problem,) = plan.problems
    assert problem.startswith("cell 4 reads x, which the notebook has assigned since the ranks have: give one")


# -- what was typed


def test_a_problem_is_written_with_partial() -> None:
    text = script_of("x = 1", "%run other.py", partial=True)
    assert "raise NotImplementedError('cell 2: %run other.py')" in text


@pytest.mark.parametrize(("typed", "numbers"), [("3", {3}), ("3-5,12", {3, 4, 5, 12}), ("18-", {18, 19})])
def test_numbers_of_cells(typed: str, numbers: set[int]) -> None:
    assert executions.parse_numbers(typed, 19) == numbers
