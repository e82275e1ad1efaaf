"""Plugins that are broken in every way: skipped whole with one line, or raised in strict mode."""

from __future__ import annotations

import plugin_site
import pytest
from plugin_site import PREAMBLE, Site, discover, info, names, offering

from specdec_core.contract.errors import PluginError

site = plugin_site.site

BROKEN = {
    "import": ("import nowhere_to_be_found\n", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
    "import-error": ("raise ImportError('no cuda here')\n", "ImportError: no cuda here"),
    "syntax": ("def f(:\n", "SyntaxError: invalid syntax (broken_plugin.py, line 1)"),
    "exit": ("raise SystemExit(3)\n", "SystemExit: 3"),
    "silent-exit": ("import sys\nsys.exit()\n", "SystemExit"),
    "base-exception": ("class Odd(BaseException): ...\nraise Odd('odd')\n", "Odd: odd"),
    "lines": ("raise ValueError('one\\n  two')\n", "ValueError: one two"),
    "unprintable": (
        "class Odd(Exception):\n    def __str__(self): raise RuntimeError\nraise Odd\n",
        "Odd: (its text cannot be shown)",
    ),
    "half-registered": (
        offering("medusa", verifiers=("typical",)).replace(
            "register(verifier_typical)", "register(verifier_typical); 1 / 0"
        ),
        "ZeroDivisionError: division by zero",
    ),
    "user-error": (
        offering("medusa", more="raise UsageError('medusa needs a licence; write to us')"),
        "medusa needs a licence; write to us",
    ),
    "misspelt": (
        offering("medusa").replace("specdec_register_drafters", "specdec_register_draftres"),
        "specdec_register_draftres is no hook of specdec; did you mean specdec_register_drafters?",
    ),
    "misspelt-without-mark": (
        offering("medusa") + "\ndef specdec_registr_verifiers(register): ...\n",
        "specdec_registr_verifiers is no hook of specdec; did you mean specdec_register_verifiers?",
    ),
    "foreign-hook": (
        PREAMBLE + "\n@hookimpl\ndef collect_everything(): ...\n",
        "collect_everything is no hook of specdec; there are: specdec_register_drafters, specdec_reg",
    ),
    "no-mark": (
        offering("medusa").replace(
            "@hookimpl\ndef specdec_register_drafters", "def specdec_register_drafters"
        ),
        "specdec_register_drafters lacks its mark; put @hookimpl before it",
    ),
    "no-hook": ("x = 1\n", "it implements no hook; there are: specdec_register_drafters"),
    "wrong-argument": (
        offering("medusa").replace("drafters(register):", "drafters(registry):"),
        "Argument(s) {'registry'} are declared in the hookimpl but can not be found in the hookspec",
    ),
    "api-version": (
        offering("medusa", more="SPECDEC_API_VERSION = 2"),
        "it is built for version 2 of the plugin API and this specdec has version 1",
    ),
    "api-version-text": (
        offering("medusa", more="SPECDEC_API_VERSION = '10.1'"),
        "it is built for version 10.1 of the plugin API and this specdec has version 1",
    ),
    "two-of-one-name": (
        offering("medusa") + "\nclass Other(Part):\n    name = 'medusa'\n"
        "@hookimpl\ndef specdec_register_drafters(register): register(drafter_medusa); register(Other)\n",
        "it registers two drafters named 'medusa'; rename one",
    ),
    "not-a-class": (
        offering("medusa").replace("register(drafter_medusa)", "register(drafter_medusa(Config()))"),
        "register takes a drafter class, not <broken_plugin.drafter_medusa object",
    ),
    "no-name": (offering("medusa").replace("name = 'medusa'", "..."), "drafter_medusa lacks name"),
    "no-parts": (
        offering("medusa").replace("class drafter_medusa(Part)", "class drafter_medusa"),
        "drafter class drafter_medusa lacks Config, bind(), admit(), propose(), observe(), release()",
    ),
    "no-laws": (
        offering(verifiers=("typical",)).replace("laws, preference = frozenset(), 0", "laws: frozenset"),
        "verifier class verifier_typical lacks laws, preference",
    ),
    "no-verify": (
        offering(verifiers=("typical",)).replace("name = 'typical'", "name = 'typical'\n    verify = None"),
        "verifier class verifier_typical lacks verify()",
    ),
    "config-no-model": (
        offering("medusa").replace("name = 'medusa'", "name = 'medusa'\n    Config = dict"),
        "drafter class drafter_medusa: Config is no pydantic model but <class 'dict'>",
    ),
    "bad-name": (
        offering("medusa").replace("'medusa'", "'Medusa-2'"),
        "drafter class drafter_medusa has name 'Medusa-2', which must match [a-z][a-z0-9_]*",
    ),
    "bad-end-of-name": (
        offering("medusa").replace("'medusa'", "'medusa-2'"),
        "drafter class drafter_medusa has name 'medusa-2', which must match [a-z][a-z0-9_]*",
    ),
    "number-as-name": (offering("medusa").replace("'medusa'", "7"), "has name 7, which must match"),
    "reserved-name": (
        offering(verifiers=("auto",)),
        "verifier class verifier_auto has name 'auto', which specdec keeps for itself",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_skipped_with_one_line_and_the_others_work(site: Site, case: str) -> None:
    """B95, B97."""
    text, reason = BROKEN[case]
    site.add("broken", text, version="0.9")
    site.add("alpha", offering("eagle"))
    site.add("zulu", offering("hydra"))
    found = discover()
    [line] = found.lines
    assert line.startswith("specdec: skipped plugin 'broken_plugin' of broken 0.9: ")
    assert reason in line
    assert "\n" not in line
    assert names(found.registry) == ["eagle", "hydra", "prompt_lookup", "small_model"]
    assert [entry.name for entry in found.registry.verifiers()] == ["greedy"]
    broken = info(found.registry, "broken")
    assert (broken.status, broken.drafters, broken.verifiers) == ("failed", (), ())
    assert reason in str(broken.error)


@pytest.mark.parametrize("case", BROKEN)
def test_strict_mode_raises_with_the_cause_and_names_the_plugin(site: Site, case: str) -> None:
    """B97."""
    text, reason = BROKEN[case]
    site.add("broken", text, version="0.9")
    with pytest.raises(PluginError) as caught:
        discover({"SPECDEC_STRICT_PLUGINS": "1"})
    error = caught.value
    assert "plugin 'broken_plugin' of broken 0.9: " in str(error)
    assert reason in str(error)
    assert (error.distribution, error.version, error.entry_point) == ("broken", "0.9", "broken_plugin")
    assert error.__cause__ is not None
    assert error.__cause__.__traceback__ is not None


def test_strict_as_an_argument_outdoes_the_environment(site: Site) -> None:
    site.add("broken", "1 / 0\n")
    assert len(discover({"SPECDEC_STRICT_PLUGINS": "1"}, strict=False).lines) == 1
    assert len(discover({"SPECDEC_STRICT_PLUGINS": "0"}).lines) == 1
    with pytest.raises(PluginError):
        discover(strict=True)


def test_ctrl_c_is_not_taken_for_a_fault(site: Site) -> None:
    site.add("broken", "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        discover()


@pytest.mark.parametrize("points", ["[specdec]\nno equals sign\n", "[specdec]\nmedusa = \n"])
def test_unreadable_entry_points_hide_no_other_plugin(site: Site, points: str) -> None:
    site.add("alpha", None, entry_points=points)
    site.add("zulu", offering("hydra"))
    found = discover()
    assert names(found.registry) == ["hydra", "prompt_lookup", "small_model"]
    assert len(found.lines) == 1
    assert "of alpha 1.0" in found.lines[0]
    assert info(found.registry, "alpha").status == "failed"


def test_unreadable_entry_points_of_a_stranger_are_nothing_to_us(site: Site) -> None:
    site.add("alpha", None, entry_points="[console_scripts]\nno equals sign\n")
    assert discover().lines == []


def test_distributions_without_metadata_are_named_unknown(site: Site) -> None:
    for distribution, drafter in (("alpha", "medusa"), ("beta", "eagle")):
        site.add(distribution, offering(drafter))
        (site.folder / f"{distribution}-1.0.dist-info" / "METADATA").unlink()
    found = discover()
    assert names(found.registry) == ["eagle", "medusa", "prompt_lookup", "small_model"]
    unknown = [plugin for plugin in found.registry.plugins() if plugin.distribution == "unknown"]
    assert [plugin.version for plugin in unknown] == ["unknown", "unknown"]


def test_pluggys_own_options_of_a_hook_are_honoured(site: Site) -> None:
    text = offering("medusa").replace(
        "@hookimpl\ndef specdec_register_drafters",
        "@hookimpl(specname='specdec_register_drafters')\ndef ours",
    )
    site.add("alpha", text + "\n@hookimpl(optionalhook=True)\ndef specdec_of_some_later_day(): ...\n")
    found = discover()
    assert found.lines == []
    assert found.registry.drafter("medusa").name == "medusa"


@pytest.mark.parametrize("version", ["1", "'1'", "'1.7'", "1.2"])
def test_the_same_major_version_is_accepted(site: Site, version: str) -> None:
    site.add("alpha", offering("medusa", more=f"SPECDEC_API_VERSION = {version}"))
    assert discover().lines == []


def test_a_second_plugin_of_a_distribution_cannot_take_its_names(site: Site) -> None:
    points = "[specdec]\na = alpha_plugin\nb = alpha_extra\n"
    site.add("alpha", offering("medusa"), entry_points=points)
    (site.folder / "alpha_extra.py").write_text(offering("medusa", "eagle"))
    site.modules.append("alpha_extra")
    found = discover()
    assert len(found.lines) == 1
    assert "plugin 'b' of alpha 1.0: 'medusa' is also in plugin 'a' of this distribution" in found.lines[0]
    assert names(found.registry) == ["medusa", "prompt_lookup", "small_model"]
