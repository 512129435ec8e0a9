"""The table of capture hooks; tests/sglang holds it against the installed SGLang itself."""

import pytest

from target_bridge.sglang_hooks import ALGORITHMS, HOOKS, VERSIONS, class_serving, table_serving


@pytest.mark.parametrize(
    ("name", "dspark", "dflash", "eagle3"),
    [  # by hand from field_survey 3.6
        ("Qwen3ForCausalLM", "dflash", "dflash", "eagle3"),
        ("LlamaForCausalLM", "dflash", "dflash", "eagle3"),
        ("Qwen2ForCausalLM", None, None, "eagle3"),
        ("Glm4MoeForCausalLM", None, None, "eagle3"),
        ("GlmMoeDsaForCausalLM", "dflash", "dflash", "eagle3"),
        ("DeepseekV4ForCausalLM", "dspark", None, None),
        ("KimiK3ForConditionalGeneration", "dspark", "dflash", None),
        ("GPT2LMHeadModel", None, None, None),
    ],
)
def test_what_0_5_23_serves(name, dspark, dflash, eagle3):
    serving = table_serving(name, "0.5.23")
    assert [serving.hook(key) for key in ALGORITHMS] == [dspark, dflash, eagle3]


def test_words():
    assert table_serving("Qwen3ForCausalLM").explain("DSPARK") == (
        "yes: SGLang 0.5.23 taps Qwen3ForCausalLM through set_dflash_layers_to_capture"
    )
    older = table_serving("Qwen3_5ForCausalLM", "0.5.16").explain("DSPARK")
    assert older.startswith("no: Qwen3_5ForCausalLM has no")
    assert older.endswith("; SGLang 0.5.23 has it")
    assert table_serving("GPT2LMHeadModel").explain("DFLASH").endswith("; no supported version has it")
    assert "start the ids with 1" in table_serving("DeepseekV3ForCausalLM").explain("EAGLE3")
    with pytest.raises(ValueError, match=r"0\.5\.14 is not one of the supported versions 0\.5\.16, 0\.5\.23"):
        table_serving("Qwen3ForCausalLM", "0.5.14")


def test_newer_versions_lose_nothing():
    assert VERSIONS == ("0.5.16", "0.5.23")
    for name, hooks in HOOKS["0.5.16"].items():
        assert hooks <= HOOKS["0.5.23"][name], name


def test_a_class_is_asked_itself():
    class Model:
        def set_eagle3_layers_to_capture(self, ids):
            raise AssertionError

    serving = class_serving(Model, "0.5.23")
    assert (serving.architecture, serving.hooks, serving.loaded) == ("Model", {"eagle3"}, True)
