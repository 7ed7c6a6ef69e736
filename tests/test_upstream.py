"""The list of OpenRLHF's internals: complete, true of the installed version, and what it says of another one."""

import ast
import shutil
from pathlib import Path

import pytest

pytest.importorskip("openrlhf")

from package_source import Package, parameters
from upstream_internals import INTERNALS, problems

from openrlhf_dbb.upstream import installed_folder

ROOT = Path(__file__).parents[1] / "openrlhf_dbb"
OPENRLHF = Package(installed_folder())
FILES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def listed(*uses):
    """(module, name, use, file) of the list, of some uses."""
    return {
        (module, each.name, each.use, file)
        for module, internals in INTERNALS.items()
        for each in internals
        for file in each.where.split(", ")
        if each.use in uses
    }


def imports(tree):
    """What names of a file stand for: (module of OpenRLHF, name in it); the name is None for the module itself."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("openrlhf."):
                    found[alias.asname] = (alias.name, None)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "openrlhf":
            for alias in node.names:
                is_module = bool(OPENRLHF.tree(f"{node.module}.{alias.name}").body)
                place = (f"{node.module}.{alias.name}", None) if is_module else (node.module, alias.name)
                found[alias.asname or alias.name] = place
    return found


def subclasses(tree):
    """(our class, module, their class) of a file, also where ours has another one between."""
    known, found = imports(tree), []
    for node in (each for each in tree.body if isinstance(each, ast.ImportFrom)):
        file = node.module.partition(".")[2].replace(".", "/") + ".py"
        between = {cls.name: theirs for cls, *theirs in subclasses(FILES[file])} if file in FILES else {}
        known |= {alias.name: tuple(between[alias.name]) for alias in node.names if alias.name in between}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            # class A(Theirs), class A(upstream.plain_class(Theirs))
            for name in (name.id for base in node.bases for name in ast.walk(base) if isinstance(name, ast.Name)):
                if known.get(name, (None, None))[1]:
                    known[node.name] = known[name]
                    found.append((node, *known[name]))
    return found


def replaced(tree):
    """(module, name) of each ``module, "name"`` in a call or a tuple: what upstream.replace() is given."""
    known = imports(tree)
    lists = [
        n.args if isinstance(n, ast.Call) else n.elts for n in ast.walk(tree) if isinstance(n, (ast.Call, ast.Tuple))
    ]
    return {
        (known[first.id][0], second.value)
        for first, second in (each[:2] for each in lists if len(each) > 1)
        if isinstance(first, ast.Name) and first.id in known and isinstance(second, ast.Constant)
    }


def overrides():
    """(module, Class.method, file, our method, theirs) of each method of theirs that a class of ours defines."""
    return [
        (module, f"{theirs}.{method.name}", file, method, members[method.name].node)
        for file, tree in FILES.items()
        for node, module, theirs in subclasses(tree)
        for members in [OPENRLHF.members(OPENRLHF.find(module, theirs))]
        for method in node.body
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) and method.name in members
    ]


def test_the_installed_version_is_as_listed():
    assert problems() == []


def test_every_name_that_is_imported_is_listed():
    found = set()
    for file, tree in FILES.items():
        known = imports(tree)
        found |= {(module, name, file) for module, name in known.values() if name}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
                module, name = known[node.value.id]
                if name is None:
                    found.add((module, node.attr, file))
    assert len(found) > 20
    uses = ("replaced", "subclassed", "called", "used")
    assert found - {(module, name, file) for module, name, _, file in listed(*uses)} == set()


def test_every_class_and_method_that_ours_take_the_place_of_is_listed_and_nothing_else():
    found = {(*place, "replaced", file) for file, tree in FILES.items() for place in replaced(tree)}
    found |= {(m, name, "subclassed", file) for file, tree in FILES.items() for _, m, name in subclasses(tree)}
    found |= {(module, name, "overridden", file) for module, name, file, _, _ in overrides()}
    assert found == listed("replaced", "subclassed", "overridden")


def test_every_inherited_method_and_attribute_that_a_subclass_uses_is_listed():
    missing = set()
    for file, tree in FILES.items():
        for node, module, theirs in subclasses(tree):
            members = OPENRLHF.members(OPENRLHF.find(module, theirs))
            known = {
                name
                for each in INTERNALS[module]
                if each.name.split(".")[0] == theirs and file in each.where.split(", ")
                for name in [*each.attributes.split(", "), each.name.partition(".")[2]]
            }
            used = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and is_own(n.value)}
            missing |= {f"{module}.{theirs}.{name} in {file}" for name in used & members.keys() - known}
    assert missing == set()


def is_own(node):
    return ast.unparse(node) in ("self", "super()")


def test_what_is_listed_is_still_used_where_the_list_says():
    for internals in INTERNALS.values():
        for each in internals:
            owner, _, member = each.name.partition(".")
            names = [*filter(None, each.attributes.split(", "))]
            if each.use != "used" and not names:
                names.append(owner if member in ("", "__init__") else member)
            words = [
                {word for node in ast.walk(FILES[file]) for word in words_of(node)} for file in each.where.split(", ")
            ]
            for name in names:
                assert any(name in of for of in words), (each.name, name)


def words_of(node):
    values = (getattr(node, field, None) for field in ("id", "attr", "name", "arg", "value"))
    return [value for value in values if isinstance(value, str)]


def accepts(ours, theirs):
    """Whether our parameters suit any call that suits theirs: each is there by its name, or caught by * or **."""
    names = [a.arg for a in ours.args]
    shared = [a.arg for a in theirs.args if a.arg in names]
    every = all(a.arg in names or ours.vararg or ours.kwarg for a in theirs.args)
    keywords = all(a.arg in names + [b.arg for b in ours.kwonlyargs] or ours.kwarg for a in theirs.kwonlyargs)
    caught = (ours.vararg or not theirs.vararg) and (ours.kwarg or not theirs.kwarg)
    return every and keywords and caught and shared == [name for name in names if name in shared]


def needed(arguments):
    """Names that a call must give."""
    given = arguments.args[: len(arguments.args) - len(arguments.defaults)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {a.arg for a in given} | {a.arg for a, default in keywords if default is None}


def test_our_methods_accept_what_openrlhf_calls_theirs_with():
    # Constructors only where OpenRLHF makes the objects; what ours need beyond theirs, we give.
    made_there = {f"{name}.__init__" for _, name, _, _ in listed("replaced")}
    checked = [each for each in overrides() if "__init__" not in each[1] or each[1] in made_there]
    assert len(checked) > 15
    for _, name, file, ours, theirs in checked:
        assert accepts(ours.args, theirs.args), (name, file)
        assert name in made_there or needed(ours.args) <= {a.arg for a in theirs.args.args}, (name, file)
    for module, name, _, file in listed("imitated"):
        functions = [n for n in ast.walk(FILES[file]) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        [ours] = [function for function in functions if function.name == name.split(".")[-1]]
        assert parameters(ours) == parameters(OPENRLHF.find(module, name).node), (name, file)


def test_another_version_gives_a_line_for_each_change(tmp_path):
    changed = tmp_path / "openrlhf"
    shutil.copytree(OPENRLHF.folder, changed, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in (
        ("cli/train_ppo_ray.py", "\n    train(args)", "\n    main(args)"),
        ("trainer/ppo_trainer.py", "def train_step(self, rollout_samples, ", "def train_step(self, samples, "),
        ("trainer/ppo_utils/experience.py", "def remove_padding_in_sequences", "def remove_padding"),
        ("trainer/ppo_utils/replay_buffer.py", "dynamic_indices", "micro_batches"),
        ("trainer/ppo_utils/samples_generator.py", "def generate_samples", "def samples"),
        ("trainer/ray/launcher.py", "import PlacementGroup, placement_group", "import PlacementGroup"),
        ("utils/__init__.py", "from .utils import", "from .helpers import"),
    ):
        text = (changed / file).read_text()
        assert old in text
        (changed / file).write_text(text.replace(old, new))

    assert problems(Package(changed)) == [
        "openrlhf.cli.train_ppo_ray.get_strategy is missing (replaced in upstream/__init__.py)",
        "openrlhf.trainer.ppo_trainer.PPOTrainer.train_step takes (samples, global_step), checked was "
        "(rollout_samples, global_step) (overridden in actors/trainer.py)",
        "openrlhf.trainer.ppo_utils.experience.remove_padding_in_sequences is missing "
        "(called in actors/replay_rows.py)",
        "openrlhf.trainer.ppo_utils.replay_buffer.NaiveReplayBuffer has no attribute dynamic_indices "
        "(used in actors/policy_actor.py)",
        "openrlhf.trainer.ppo_utils.samples_generator.SamplesGenerator.generate_samples is missing "
        "(overridden in actors/generation.py)",
        "openrlhf.trainer.ray.launcher.placement_group is missing (replaced in upstream/__init__.py)",
        "openrlhf.utils.get_strategy is missing (called in driver/strategy.py)",
        "openrlhf.utils.get_tokenizer is missing (called in driver/preflight.py)",
        "openrlhf.cli.train_ppo_ray no longer builds its parser under __main__ (called in upstream/__init__.py)",
    ]
