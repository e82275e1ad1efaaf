"""Discovery: which plugins are loaded, what is listed, and what a fresh process shows."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import plugin_site
import pytest
from plugin_site import PREAMBLE, Site, discover, info, module_of, names, offering

from specdec_core.contract.errors import InvalidParameter, PluginError, UnknownPlugin
from specdec_core.plugins.hookspecs import hookimpl
from specdec_core.plugins.registry import BUILT_IN, PluginInfo, Registry

ROOT = Path(__file__).parents[2]
site = plugin_site.site


# --- what works --------------------------------------------------------------------------------


def test_built_ins_and_third_parties_take_the_same_way(site: Site) -> None:
    module = site.add("alpha", offering("medusa", verifiers=("typical",)), version="2.1")
    found = discover()
    assert found.lines == []
    assert names(found.registry) == ["medusa", "prompt_lookup", "small_model"]
    assert [entry.qualified for entry in found.registry.verifiers()] == [
        f"{BUILT_IN}/greedy",
        "alpha/typical",
    ]
    assert found.registry.drafter("medusa").name == "medusa"
    assert found.registry.verifier("typical").name == "typical"
    assert info(found.registry, "alpha") == PluginInfo(
        name=module,
        distribution="alpha",
        version="2.1",
        origin=str(site.folder / f"{module}.py"),
        status="loaded",
        drafters=("medusa",),
        verifiers=("typical",),
    )
    assert json.dumps([asdict(plugin) for plugin in found.registry.plugins()])


def test_a_qualified_name_works_with_any_spelling_of_the_distribution(site: Site) -> None:
    site.add("Alpha.Beta", offering("medusa"))
    registry = discover().registry
    medusa = registry.drafter("medusa")
    for distribution in ("Alpha.Beta", "alpha-beta", "alpha_beta", "ALPHA.beta"):
        assert registry.drafter(f"{distribution}/medusa") is medusa
    assert registry.drafter(f"{BUILT_IN}/prompt_lookup") is registry.drafter("prompt_lookup")


def test_an_entry_point_may_name_an_object(site: Site) -> None:
    text = f"{PREAMBLE}\nclass D(Part):\n    name = 'medusa'\nclass Hooks:\n    @hookimpl\n"
    text += "    def specdec_register_drafters(self, register): register(D)\nplugin = Hooks()\n"
    site.add("alpha", text, entry_points="[specdec]\nmedusa = alpha_plugin:plugin\n")
    found = discover()
    assert found.lines == []
    assert found.registry.drafter("medusa").name == "medusa"
    assert info(found.registry, "alpha").origin == str(site.folder / "alpha_plugin.py")


def test_one_module_under_two_entry_points_is_no_clash(site: Site) -> None:
    site.add("alpha", offering("medusa"), entry_points="[specdec]\none = alpha_plugin\ntwo = alpha_plugin\n")
    found = discover()
    assert found.lines == []
    assert found.registry.drafter("medusa").name == "medusa"


def test_the_first_of_two_copies_of_a_distribution_counts(site: Site, tmp_path: Path) -> None:
    site.add("alpha", offering("medusa"))
    other = Site(tmp_path / "other")
    other.folder.mkdir()
    other.add("Alpha", None, version="9")
    path = [str(site.folder), str(other.folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            importlib.metadata,
            "distributions",
            lambda: importlib.metadata.Distribution.discover(path=path),
        )
        registry = discover().registry
    assert info(registry, "alpha").version == "1.0"
    assert not [plugin for plugin in registry.plugins() if plugin.distribution == "Alpha"]


# --- which plugins -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, ["eagle", "medusa"]),
        ("", []),
        (" ", []),
        ("alpha", ["medusa"]),
        ("beta_plugin", ["eagle"]),
        ("Alpha, beta-plugin", ["eagle", "medusa"]),
    ],
)
def test_specdec_plugins_lists_the_third_parties(site: Site, listed: str | None, expected: list[str]) -> None:
    site.add("alpha", offering("medusa"))
    site.add("beta", offering("eagle"))
    found = discover({} if listed is None else {"SPECDEC_PLUGINS": listed})
    assert found.lines == []
    assert names(found.registry) == [*expected, "prompt_lookup", "small_model"]


def test_a_plugin_that_is_not_listed_is_not_even_imported(site: Site) -> None:
    module = site.add("alpha", offering("medusa"))
    plugin = info(discover({"SPECDEC_PLUGINS": ""}).registry, "alpha")
    assert (plugin.status, plugin.error, plugin.origin) == ("blocked", "not in SPECDEC_PLUGINS", module)
    assert module not in sys.modules


def test_a_listed_plugin_that_is_not_installed_is_reported(site: Site) -> None:
    site.add("alpha", offering("medusa"))
    [line] = discover({"SPECDEC_PLUGINS": "alhpa"}).lines
    assert line.startswith(
        "specdec: SPECDEC_PLUGINS names 'alhpa', which is no plugin here; did you mean 'alpha'?"
    )


@pytest.mark.parametrize("name", ["alpha", "alpha_plugin", "Alpha-Plugin"])
def test_a_plugin_can_be_left_out_by_name(site: Site, name: str) -> None:
    module = site.add("alpha", "1 / 0\n")
    found = discover(blocked=[name])
    assert found.lines == []
    assert info(found.registry, "alpha").status == "blocked"
    assert module not in sys.modules


def test_built_ins_can_be_left_out_by_name_only(site: Site) -> None:
    assert names(discover(blocked=[BUILT_IN]).registry) == []


def test_leaving_out_what_is_not_there_is_a_mistake(site: Site) -> None:
    site.add("alpha", offering("medusa"))
    with pytest.raises(
        UnknownPlugin, match="cannot leave out 'alhpa', which is no plugin here; did you mean 'alpha'"
    ):
        discover(blocked=["alhpa"])


# --- in process --------------------------------------------------------------------------------


def test_a_plugin_can_be_registered_in_process() -> None:
    registry = Registry()
    plugin = registry.register(module_of(offering("medusa", verifiers=("typical",))), name="mine")
    assert (plugin.status, plugin.drafters, plugin.verifiers) == ("loaded", ("medusa",), ("typical",))
    assert registry.plugins() == [plugin]
    assert registry.drafter("medusa") is registry.drafter("mine/medusa")
    assert registry.build_drafter("medusa", {"num_tokens": "2"}).name == "medusa"


def test_objects_with_hooks_are_plugins_too() -> None:
    drafter = vars(module_of(offering("medusa")))["drafter_medusa"]

    class Mine:
        @hookimpl
        def specdec_register_drafters(self, register: object) -> None:
            assert callable(register)
            register(drafter)

    registry = Registry()
    assert registry.register(Mine()).name == "Mine"
    assert registry.drafter("medusa") is drafter


def test_a_refused_registration_raises_and_changes_nothing() -> None:
    registry = Registry()
    registry.register(module_of(offering("medusa")), name="mine")
    with pytest.raises(InvalidParameter, match="a plugin named 'Mine' is there already"):
        registry.register(module_of(offering("eagle")), name="Mine")
    with pytest.raises(PluginError, match="plugin 'other' of other: ZeroDivisionError"):
        registry.register(
            module_of(offering("eagle").replace("register(drafter_eagle)", "register(drafter_eagle); 1 / 0")),
            name="other",
        )
    assert names(registry) == ["medusa"]
    assert len(registry.plugins()) == 1


# --- a process of its own ----------------------------------------------------------------------

SCRIPT = """
import sys
from specdec_core.plugins.registry import Registry
registry = Registry.discover(blocked=sys.argv[1:])
print(*(entry.qualified for entry in registry.drafters() if entry.distribution in ("alpha", "specdec-core")))
print("torch" in sys.modules)
"""


def run(site: Site, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Discover in a fresh interpreter; the site's own `specdec-core` comes before an installed one."""
    path = os.pathsep.join(map(str, (site.folder, ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "SPECDEC_PLUGINS": "alpha,broken", **environ}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nowhere_to_be_found\n", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("def f(:\n", "SyntaxError: invalid syntax (broken_plugin.py, line 1)"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
    ],
)
def test_a_broken_plugin_costs_one_line_on_stderr(site: Site, text: str, reason: str) -> None:
    site.add("alpha", offering("medusa"))
    site.add("broken", text, version="0.9")
    done = run(site)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == f"alpha/medusa {BUILT_IN}/prompt_lookup {BUILT_IN}/small_model"
    assert done.stderr == f"specdec: skipped plugin 'broken_plugin' of broken 0.9: {reason}\n"
    assert run(site, "broken").stderr == ""


def test_strict_mode_shows_where_the_plugin_broke(site: Site) -> None:
    site.add("broken", "def boom():\n    raise SystemExit(3)\nboom()\n", version="0.9")
    done = run(site, SPECDEC_STRICT_PLUGINS="1")
    assert done.returncode == 1
    assert "broken_plugin.py" in done.stderr
    assert "PluginError: plugin 'broken_plugin' of broken 0.9: SystemExit: 3" in done.stderr


def test_the_registry_itself_imports_no_torch() -> None:
    text = "import specdec_core.contract.errors, sys\n"
    text += "from specdec_core.plugins import hookspecs, registry, spec_string\n"
    text += "print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "False\n"
