"""Which target classes stock SGLang can tap, and hence which drafts it can serve for them (field_survey 3.6).

A draft reads hidden states of its target, so SGLang must know how to hand them out: a model class has a
`set_dflash_layers_to_capture`, `set_dspark_layers_to_capture` or `set_eagle3_layers_to_capture` method, or it has not.
A DSpark draft takes the second where there is one and the first otherwise; the others need their own.

The tables were read from the wheels of the two supported versions, inheritance resolved; `tests/sglang` holds them
against the installed one. This module imports nothing of SGLang, so it also answers where that is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Draft algorithm -> the hooks of which one is enough, the preferred one first.
ALGORITHMS = {"DSPARK": ("dspark", "dflash"), "DFLASH": ("dflash",), "EAGLE3": ("eagle3",)}

_BOTH = """
    DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM Gemma4ForCausalLM
    Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM
    GptOssForCausalLM IQuestCoderForCausalLM InternLM3ForCausalLM InternS1ProForConditionalGeneration
    InternS2PreviewForConditionalGeneration KimiK25ForConditionalGeneration Llama4ForCausalLM LlamaForCausalLM
    MellumForCausalLM Ministral3ForCausalLM MistralForCausalLM MistralLarge3ForCausalLM Phi3ForCausalLM
    Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3VLForConditionalGeneration
    Qwen3VLMoeForConditionalGeneration Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration
    TeleFLMForCausalLM
"""
_EAGLE3_ONLY = """
    ApertusForCausalLM BailingMoEForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM ExaoneMoEForCausalLM
    Gemma3ForCausalLM Gemma3ForConditionalGeneration Glm4MoeForCausalLM Llama4ForConditionalGeneration
    LongcatFlashForCausalLM MindSporeForCausalLM MiniMaxM2ForCausalLM MiniMaxM3SparseForCausalLM Qwen2ForCausalLM
    Qwen2MoeForCausalLM Qwen2_5_VLForConditionalGeneration SarvamMoEForCausalLM
"""
#: version -> (hooks, the classes that have exactly these).
_TABLES: dict[str, tuple[tuple[str, str], ...]] = {
    "0.5.16": (
        ("dflash eagle3", _BOTH),
        ("eagle3", _EAGLE3_ONLY),
        ("dflash", "LagunaForCausalLM"),
        ("dspark", "DeepseekV4ForCausalLM"),
    ),
    "0.5.23": (
        (
            "dflash eagle3",
            _BOTH
            + """
            Cosmos3ForConditionalGeneration Glm5NextForConditionalGeneration InternS2MobiusForConditionalGeneration
            Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen4ExpForConditionalGeneration
            """,
        ),
        ("eagle3", _EAGLE3_ONLY + " ExaoneMoeForCausalLM"),
        (
            "dflash",
            """
            BeamForCausalLM InklingForConditionalGeneration LagunaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM
            Lfm2VlForConditionalGeneration MiMoV2FlashForCausalLM MiMoV2ForCausalLM MuseGlimmerForCausalLM
            MuseGlimmerForConditionalGeneration MuseSparkForConditionalGeneration NanbeigeForCausalLM
            NemotronHForCausalLM NemotronHPuzzleForCausalLM NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2
            NemotronH_Omni_Reasoning_V3
            """,
        ),
        ("dflash dspark", "KimiK3ForConditionalGeneration KimiK3LinearForCausalLM"),
        ("dflash dspark eagle3", "MiniMaxM3SparseForConditionalGeneration"),
        ("dspark", "BailingMoeV3ForCausalLM DeepseekV4ForCausalLM KimiLinearForCausalLM"),
    ),
}
HOOKS: dict[str, dict[str, frozenset[str]]] = {
    version: {name: frozenset(hooks.split()) for hooks, names in groups for name in names.split()}
    for version, groups in _TABLES.items()
}
#: Newest last.
VERSIONS = tuple(HOOKS)

#: Classes whose EAGLE-3 hook takes the ids as they are, one layer early, unless the first one is 1.
_EAGLE3_QUIRK = (
    "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLM",
    "KimiK25ForConditionalGeneration", "MistralLarge3ForCausalLM", "Glm4MoeLiteForCausalLM",
)  # fmt: skip


@dataclass(frozen=True)
class Serving:
    """What stock SGLang offers for one target class.

    Attributes:
        architecture: The class, as config.json names it.
        version: The SGLang that was asked.
        hooks: Which of "dflash", "dspark", "eagle3" the class has there.
        loaded: Whether the class itself was asked (the loaded engine), rather than the table.
    """

    architecture: str
    version: str
    hooks: frozenset[str]
    loaded: bool

    def hook(self, algorithm: str) -> str | None:
        """The hook a draft of `algorithm` (see `ALGORITHMS`) is served through; None = it cannot be served."""
        return next((name for name in ALGORITHMS[algorithm] if name in self.hooks), None)

    def explain(self, algorithm: str) -> str:
        """One sentence: served through which hook, or not, and which other supported version could."""
        found = self.hook(algorithm)
        where = f"SGLang {self.version}"
        if found is None:
            wanted = " or ".join(f"set_{name}_layers_to_capture" for name in ALGORITHMS[algorithm])
            others = [
                version
                for version in VERSIONS
                if version != self.version and table_serving(self.architecture, version).hook(algorithm)
            ]
            elsewhere = f"; SGLang {', '.join(others)} has it" if others else "; no supported version has it"
            return f"no: {self.architecture} has no {wanted} in {where}{elsewhere}"
        text = f"yes: {where} taps {self.architecture} through set_{found}_layers_to_capture"
        if algorithm == "EAGLE3" and self.architecture in _EAGLE3_QUIRK:
            text += ", which counts from the first layer's output only if the first id is 1: start the ids with 1"
        return text


def table_serving(architecture: str, version: str = VERSIONS[-1]) -> Serving:
    """What the table says of a class.

    Args:
        architecture: The first of `architectures` in the target's config.json.
        version: A supported version.

    Raises:
        ValueError: another version.
    """
    if version not in HOOKS:
        raise ValueError(f"SGLang {version} is not one of the supported versions {', '.join(VERSIONS)}")
    return Serving(architecture, version, HOOKS[version].get(architecture, frozenset()), loaded=False)


def class_serving(model_class: type, version: str) -> Serving:
    """What a class of the installed SGLang has.

    Args:
        model_class: The class of the loaded model.
        version: Of the installed SGLang.
    """
    hooks = frozenset(
        name for name in ("dflash", "dspark", "eagle3") if hasattr(model_class, f"set_{name}_layers_to_capture")
    )
    return Serving(model_class.__name__, version, hooks, loaded=True)
