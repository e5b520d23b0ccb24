"""Send random object graphs through ddip's pickling, and compare them with the same graph in one process.

    python -m tests.object_graphs --graphs 5000 --seed 1
    python -m tests.object_graphs --replay 17          one graph: its program, and the differences

A graph is a program for ``__main__``, which can run in any process. Its probe calls the functions, changes shared
objects, and trains the models. The results are described as text: values, identity, shared memory, closure cells, and
whether the globals of functions are the variables of their process.
"""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import random
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch

from ddip.protocol.objects import pickling
from ddip.protocol.objects.definitions import LEFT_OUT
from ddip.protocol.objects.pickling import Loader, Pickled

ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...))
STATE_OF_OPTIMIZER = ("defaults", "state", "param_groups")
"""Attributes of an optimizer that are compared; torch recomputes the rest."""
NOT_PICKLED = ("_backward_hooks", "_initial_step", "__slotnames__", "__annotations__", "__doc__", *LEFT_OUT)
HEADER = """
import collections, dataclasses, enum, functools
import numpy as np
import torch
torch.manual_seed(0)
value, factor = 3, 2
def helper(): return value * factor
"""


# -- the program of a graph


class Program:
    """Lines of code that create a random graph from `seed`."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._lines: list[str] = []
        self.names: list[str] = []
        self._kinds: dict[str, list[str]] = collections.defaultdict(list)
        makers = [getattr(self, name) for name in sorted(vars(Program)) if name.startswith("_make_")]
        for _ in range(self._draw.randint(3, 14)):
            self._draw.choice(makers)()

    @property
    def text(self) -> str:
        """Return the whole program."""
        return HEADER + "\n".join(self._lines)

    def chosen(self) -> list[str]:
        """Return a random selection of the names."""
        return [*self._draw.sample(self.names, self._draw.randint(1, len(self.names))), "value"]

    def _add(self, kind: str, text: str) -> str:
        """Add lines that create an object; NAME in `text` stands for its new name."""
        name = f"{kind}{len(self.names)}"
        self._lines.append(textwrap.dedent(text).strip().replace("NAME", name))
        self.names.append(name)
        self._kinds[kind].append(name)
        return name

    def _any(self) -> str:
        return self._draw.choice(self.names) if self.names else "value"

    def _one(self, kind: str) -> str:
        """Return the name of an object of this kind; create one if there is none."""
        if not self._kinds[kind] or self._draw.random() < 0.3:
            getattr(self, f"_make_{kind}")()
        return self._draw.choice(self._kinds[kind])

    def _make_tensor(self) -> None:
        size = self._draw.choice((1, 6, 24, 8000))
        kind = self._draw.choice(("float32", "float64", "int64", "bfloat16", "bool", "complex64"))
        text = f"torch.arange({size}).to(torch.{kind})"
        if kind in ("float32", "float64"):
            text += self._draw.choice(("", ".requires_grad_()"))
        self._add("tensor", f"NAME = {text}")

    def _make_view(self) -> None:
        of = self._one("tensor")
        part = self._draw.choice((".detach()", "[1:]", "[::2]", "[-1]", ".view(-1, 1).T", "", ".detach()[:1]"))
        self._add("view", f"NAME = {of}.detach(){part}")

    def _make_box(self) -> None:
        items = ", ".join(self._any() for _ in range(self._draw.randint(1, 4)))
        form = self._draw.choice(
            (
                "[{}]",
                "({},)",
                "collections.deque([{}])",
                "dict(enumerate([{}]))",
                "collections.OrderedDict(enumerate([{}]))",
            )
        )
        again = self._draw.random() < 0.3 and form.startswith("[")
        self._add("box", f"NAME = {form.format(items)}" + ("\nNAME.append(NAME)" if again else ""))

    def _make_alias(self) -> None:
        self._add("alias", f"NAME = {self._any()}")

    def _make_array(self) -> None:
        self._add("array", f"NAME = np.arange({self._draw.choice((3, 5000))}) * 0.5")

    def _make_module(self) -> None:
        form = self._draw.choice(("plain", "tied", "own", "shared", "buffer", "frozen"))
        if form == "own":
            self._add("module", f"NAME = {self._one('net')}()")
            return
        size = self._draw.choice((2, 90))
        text = {
            "plain": f"NAME = torch.nn.Linear({size}, {size})",
            "tied": f"NAME = torch.nn.Sequential(*(torch.nn.Linear({size}, {size}) for _ in range(2)))\n"
            "NAME[1].weight = NAME[0].weight",
            "shared": f"NAME = torch.nn.Linear({size}, {size})\n"
            "NAME = torch.nn.Sequential(NAME, torch.nn.Tanh(), NAME)",
            "buffer": f"NAME = torch.nn.BatchNorm1d({size})\nNAME(torch.ones(2, {size}))",
            "frozen": f"NAME = torch.nn.Linear({size}, {size}).requires_grad_(False)\nNAME.act = lambda x: x * value",
        }
        self._add("module", text[form])

    def _make_net(self) -> None:
        self._add(
            "net",
            """
            class NAME(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.first = torch.nn.Linear(2, 2)
                def forward(self, x): return self.first(x) * value + helper()
            """,
        )

    def _make_optimizer(self) -> None:
        module = self._one("module")
        form = self._draw.choice(("SGD({}, lr=0.1, momentum=0.9)", "Adam({}, lr=0.1)", "AdamW({}, lr=0.1)"))
        name = self._add("optimizer", f"NAME = torch.optim.{form.format(module + '.parameters()')}")
        if self._draw.random() < 0.7:
            self._lines.append(train_text(name))

    def _make_scheduler(self) -> None:
        form = self._draw.choice(("StepLR({}, 1)", "ExponentialLR({}, 0.5)", "LambdaLR({}, lambda n: 1 / (n + value))"))
        self._add("scheduler", f"NAME = torch.optim.lr_scheduler.{form.format(self._one('optimizer'))}")

    def _make_generator(self) -> None:
        self._add("generator", "NAME = torch.Generator().manual_seed(7)")

    def _make_loader(self) -> None:
        options = f"generator={self._one('generator')}, shuffle=True"
        self._add("loader", f"NAME = torch.utils.data.DataLoader({self._one('array')}, {options})")

    def _make_function(self) -> None:
        held = self._any()
        forms = (
            "def NAME(): return value, helper()",
            f"def NAME(n=2, held={held}): return n * value, held",
            f"def NAME(): return {held}",
            "def NAME(*, up=helper): return [up() + value for _ in range(2)]",
            "NAME = lambda: helper() - value",
            f"NAME = functools.partial(lambda a, b: (a, value), {held}, b=helper)",
            "def NAME(n=3): return value if n == 0 else NAME(n - 1)",
            "def made(): yield value\nNAME = lambda: list(made())",
            "@functools.wraps(helper)\ndef NAME(): return helper() + 1",
            "@functools.lru_cache(3)\ndef NAME(): return helper() + 2",
            "def NAME():\n    class Inner:\n        x = value\n    return Inner.x",
            "@torch.no_grad()\ndef NAME(): return torch.ones(1) * value",
        )
        self._add("function", self._draw.choice(forms))

    def _make_closure(self) -> None:
        self._add(
            "closure",
            f"""
            def maker(held):
                n = 0
                def up():
                    nonlocal n
                    n += factor
                    return n, held
                def now(): return n, value
                def both(): return up(), now(), both is not None
                return {self._draw.choice(("[up, now, both]", "[now, up]", "[both, now]"))}
            NAME = maker({self._any()})
            """,
        )

    def _make_class(self) -> None:
        bases = f"({self._draw.choice(self._kinds['class'])})" if self._kinds["class"] else ""
        if bases and self._draw.random() < 0.5:
            self._add("class", f"class NAME{bases}:\n    def __call__(self): return super().__call__(), value")
            return
        self._add(
            "class",
            f"""
            class NAME:
                made = []
                held = {self._any()}
                def __init__(self): self.own = value
                def __call__(self): return self.own, value, self.it, self.of(), type(self).made
                @property
                def it(self): return helper()
                @classmethod
                def of(cls): return cls.__name__, value
                @staticmethod
                def still(): return factor
            """,
        )

    def _make_instance(self) -> None:
        cls = self._one("class")
        self._add("instance", self._draw.choice(("NAME = {}()", "NAME = {}().__call__", "NAME = {}.of")).format(cls))

    def _make_record(self) -> None:
        self._add(
            "record",
            f"""
            @dataclasses.dataclass
            class R{len(self.names)}:
                x: int = 1
                y: list = dataclasses.field(default_factory=lambda: [value])
                z: object = None
                def __call__(self): return self.x * value, R{len(self.names)}().y
            NAME = R{len(self.names)}(z={self._any()})
            """,
        )

    def _make_flag(self) -> None:
        kind = self._draw.choice(("Flag", "IntFlag"))
        self._add(
            "flag",
            f"""
            class F{len(self.names)}(enum.{kind}):
                A = 1; B = 2; ALL = 3; HIGH = 389
                def __call__(self): return value
                @classmethod
                def some(cls): return [cls.{self._draw.choice(("A", "ALL", "HIGH"))}, cls.A | cls.B]
            NAME = F{len(self.names)}.some()
            """,
        )

    def _make_choice(self) -> None:
        self._add(
            "choice",
            f"""
            class E{len(self.names)}(enum.Enum):
                ONE = 1; TWO = "two"; UNO = 1
            NAME = (E{len(self.names)}.UNO, E{len(self.names)})
            """,
        )


def train_text(optimizer: str) -> str:
    """Return code for one step of an optimizer."""
    return f"""
for _group in {optimizer}.param_groups:
    for _p in _group["params"]:
        _p.grad = torch.ones_like(_p) if _p.requires_grad else None
{optimizer}.step()
{optimizer}.zero_grad()
"""


# -- the description of a graph


class Description:
    """A text that is equal for equal graphs in any process; `variables` are those of the process."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self._variables = variables
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._kept: list[Any] = []

    def lines(self, names: Sequence[str]) -> list[str]:
        """Describe each name in one line."""
        return [f"{name} = {self.of(self._variables[name]) if name in self._variables else '?'}" for name in names]

    def of(self, obj: Any) -> str:
        """Describe an object; an object that has already been described becomes its number."""
        if type(obj) in ATOMS:
            return repr(obj)
        if isinstance(obj, type) and obj.__module__ != "__main__":
            return f"{obj.__module__}.{obj.__qualname__}"
        if isinstance(obj, (types.ModuleType, types.BuiltinFunctionType)):
            return obj.__name__
        known = self._numbers.get(id(obj))
        if known is not None:
            return f"#{known}"
        self._kept.append(obj)
        number = self._numbers[id(obj)] = len(self._numbers)
        return f"#{number} {type(obj).__name__}({', '.join(self._parts(obj))})"

    def _parts(self, obj: Any) -> Iterator[str]:
        if isinstance(obj, torch.Tensor):
            yield from self._of_tensor(obj)
        elif isinstance(obj, np.ndarray):
            yield f"{obj.dtype} {obj.tolist()}"
        elif isinstance(obj, torch.Generator):
            yield str(obj.get_state().sum().item())
        elif isinstance(obj, (list, tuple, collections.deque)):
            yield from map(self.of, obj)
        elif isinstance(obj, (dict, types.MappingProxyType)):
            yield from (f"{self.of(key)}: {self.of(value)}" for key, value in obj.items())
            yield self.of(getattr(obj, "default_factory", None))
        elif isinstance(obj, (set, frozenset)):
            yield from sorted(map(self.of, obj))
        elif isinstance(obj, types.FunctionType):
            yield from self._of_function(obj)
        elif isinstance(obj, types.CellType):
            yield self.of(obj.cell_contents)
        elif isinstance(obj, type):
            yield from self._of_class(obj)
        elif isinstance(obj, types.MethodType):
            yield from (self.of(obj.__func__), self.of(obj.__self__))
        elif isinstance(obj, property):
            yield self.of(obj.fget)
        elif isinstance(obj, (staticmethod, classmethod)):
            yield self.of(obj.__func__)
        elif isinstance(obj, functools.partial):
            yield from map(self.of, (obj.func, obj.args, obj.keywords))
        elif type(obj) is type(helper_cache):
            yield from (self.of(obj.__wrapped__), self.of(obj.cache_parameters()))
        elif isinstance(obj, types.GeneratorType):
            yield obj.__qualname__
        elif isinstance(obj, enum.Enum):
            yield from (self.of(type(obj)), repr(obj), self.of(obj.value))
        elif not hasattr(obj, "__dict__"):
            yield type(obj).__name__ if type(obj).__module__ == "dataclasses" else repr(obj)
        else:
            yield self.of(type(obj))
            kept = STATE_OF_OPTIMIZER if isinstance(obj, torch.optim.Optimizer) else vars(obj)
            yield from (f"{key}: {self.of(vars(obj)[key])}" for key in kept if key not in NOT_PICKLED)

    def _of_tensor(self, tensor: torch.Tensor) -> Iterator[str]:
        storage = tensor.untyped_storage()
        number = self._storages.setdefault(storage.data_ptr(), len(self._storages)) if storage.nbytes() else None
        yield f"{tensor.dtype} {[*tensor.shape]} {tensor.stride()} {tensor.storage_offset()} of memory {number}"
        yield f"{storage.nbytes()} bytes, {tensor.requires_grad}, {tensor.is_leaf}"
        yield f"{tensor.detach().flatten()[:50].tolist()} {tensor.detach().to(torch.complex64).sum().item()}"

    def _of_function(self, function: types.FunctionType) -> Iterator[str]:
        code = function.__code__
        yield f"{function.__name__} {function.__qualname__} {function.__module__} {code.co_code.hex()} {code.co_names}"
        if function.__globals__.get("__name__") == "__main__":
            yield "globals of this process" if function.__globals__ is self._variables else "foreign globals"
        yield from map(self.of, (function.__defaults__, function.__kwdefaults__, function.__closure__, vars(function)))

    def _of_class(self, cls: type) -> Iterator[str]:
        yield cls.__qualname__
        yield from map(self.of, cls.__bases__)
        own = {name: value for name, value in vars(cls).items() if name not in NOT_PICKLED}
        if isinstance(cls, enum.EnumMeta):
            yield repr([(name, member.value) for name, member in cls.__members__.items()])
            own = {name: value for name, value in own.items() if isinstance(value, types.FunctionType)}
        yield from (f"{name}: {self.of(own[name])}" for name in sorted(own))


helper_cache = functools.lru_cache(1)(repr)


def describe_names(variables: dict[str, Any], names: Sequence[str]) -> str:
    """Describe `names` in a process with these `variables`."""
    return "\n".join(Description(variables).lines(names))


def probe_names(variables: dict[str, Any], names: Sequence[str]) -> str:
    """Use all objects, with different values of `value`, and describe the results."""
    results = []
    for value in (variables["value"], 5):
        variables["value"] = value
        results += [f"{name}: {_use_object(variables, name)}" for name in names]
    return "\n".join([*results, describe_names(variables, names)])


def _use_object(variables: dict[str, Any], name: str) -> str:
    obj = variables[name]
    if isinstance(obj, torch.optim.Optimizer):
        exec(train_text(name), {"torch": torch, name: obj})
    elif isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
        obj.optimizer.step()
        obj.step()
    elif isinstance(obj, torch.Tensor) and obj.dtype.is_floating_point and obj.numel():
        with torch.no_grad():
            obj.mul_(2)
    elif isinstance(obj, list):
        found = [item() for item in obj if isinstance(item, types.FunctionType)]
        obj.append(name)
        return Description(variables).of(found)
    elif isinstance(obj, torch.utils.data.DataLoader):
        return repr([batch.item() for batch, _ in zip(obj, range(3), strict=False)])
    elif isinstance(obj, torch.nn.Module) and type(obj).__module__ == "__main__":
        return Description(variables).of(obj(torch.ones(1, 2)).detach())
    elif callable(obj) and not isinstance(obj, (type, torch.nn.Module)):
        return Description(variables).of(obj())
    return ""


# -- through ddip, in this process


@dataclass
class Trial:
    """One graph that was sent from one ``__main__`` to the next."""

    seed: int
    names: list[str]
    along: list[str]
    differences: str = ""


def main_module(program: str = "") -> types.ModuleType:
    """Run a program in a new ``__main__``, which replaces this process's former one."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(program, "<graph>", "exec", dont_inherit=True), vars(module))
    return module


def send_to_new_main(names: Sequence[str]) -> list[str]:
    """Send the variables `names` to a new ``__main__``, which replaces this one; return what came along."""
    here = pickling.main_variables()
    results = pickling.dump_all({name: here[name] for name in names}, list, here)
    assert not results.errors, results.errors
    memory = {name: (pickled.joined(), pickled.sizes) for name, pickled in results.pickled.items()}
    forget_classes()
    variables = vars(main_module())
    loader = Loader({name: Pickled.of(bytes_, sizes) for name, (bytes_, sizes) in memory.items()})
    for name in memory:
        variables[name] = loader.load(name)
    return results.along


def forget_classes() -> None:
    """Make cloudpickle create classes again, as in another process."""
    cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()
    cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.clear()


def try_graph(seed: int, times: int = 2) -> Trial:
    """Send a graph `times` times, as if between processes, and compare it with the same graph unsent."""
    program = Program(seed)
    names = program.chosen()
    former = sys.modules["__main__"]
    try:
        alone = main_module(program.text)
        main_module(program.text)
        along: list[str] = []
        for _ in range(times):
            along += send_to_new_main([*names, *along])
        seen = sorted({*names, *along})
        trial = Trial(seed, names, along)
        received_main = sys.modules["__main__"]
        for how in (describe_names, probe_names):
            here, theirs = apply_in_main(how, alone, seen), apply_in_main(how, received_main, seen)
            if here != theirs and not trial.differences:
                trial.differences = f"{how.__name__}:\n{_first_difference(here, theirs)}"
        return trial
    finally:
        sys.modules["__main__"] = former


def apply_in_main(
    how: Callable[[dict[str, Any], Sequence[str]], str], main: types.ModuleType, names: Sequence[str]
) -> str:
    """Apply `how`, a describing function, to `main`, which becomes this process's ``__main__``."""
    sys.modules["__main__"] = main
    torch.manual_seed(1)
    return how(vars(main), names)


def _first_difference(here: str, theirs: str) -> str:
    for one, other in zip(here.splitlines(), theirs.splitlines(), strict=False):
        if one != other:
            at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
            part = slice(max(0, at - 60), at + 100)
            return f"  {one[:40]} ...\n  here  {one[part]}\n  there {other[part]}"
    return f"{len(here)} and {len(theirs)} characters"


def main() -> int:
    """Try many graphs; return how many differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--graphs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=int)
    args = parser.parse_args()
    if args.replay is not None:
        print(Program(args.replay).text)
    seeds = (
        [args.replay] if args.replay is not None else range(args.seed * 1_000_000, args.seed * 1_000_000 + args.graphs)
    )
    failed = 0
    for seed in seeds:
        try:
            found = try_graph(seed).differences
        except Exception as error:
            if args.replay is not None:
                raise
            found = f"{type(error).__name__}: {error}"
        if found:
            failed += 1
            print(f"graph {seed}: {found}", flush=True)
    print(f"{len(seeds)} graphs, {failed} differ")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main()))
