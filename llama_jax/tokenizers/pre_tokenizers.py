"""Pre-tokenizers of BPE vocabularies in GGUF files: llama.cpp's, by their names in `tokenizer.ggml.pre`.

Source: llama.cpp, src/llama-vocab.cpp and src/unicode.cpp, whose ids are the reference. Its regular expressions differ from
those of the published tokenizer.json: letters outside ASCII have both cases (`\\p{Lu}` is `\\p{L}`), `\\d` is ASCII only,
ranges of characters do not include white space, and characters added after Unicode 15.1 have no category.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer as Library


@dataclass(frozen=True)
class PreTokenizer:
    """The rule for a name in `tokenizer.ggml.pre`.

    Attributes:
      patterns: regular expressions; each splits the pieces from the previous one into its matches and the text between.
      ignore_merges: whether a piece that is a token becomes that token, even if merges do not lead to it.
      add_bos: whether a text begins with the BOS if the file has no `add_bos_token`.
      spells_bytes: whether tokens spell bytes as GPT-2's characters; otherwise a space is U+2581, and a byte without a token
        is `<0x0A>`.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    spells_bytes: bool = True


CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
WORD = rf"{BEFORE_WORD}\p{{L}}+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
SPACES = r"\s+(?!\S)|\s+"
LINES = rf"\s*[\r\n]+|{SPACES}"
UPPER, LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
UPPER_MARKED, LOWER_MARKED = r"(?:(?=[\p{L}\p{M}])[^a-z])", r"(?:(?=[\p{L}\p{M}])[^A-Z])"
ANY_CASE = r"[\p{L}\p{M}]"
CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
HAN = (
    r"\u4e00-\u9fff\u3400-\u4dbf\x{20000}-\x{2a6df}\x{2a700}-\x{2b73f}\x{2b740}-\x{2b81f}\x{2b820}-\x{2ceaf}"
    r"\x{2ceb0}-\x{2ebef}\uf900-\ufaff\x{2f800}-\x{2fa1f}"
)
# DeepSeek LLM's letters: only those of alphabets with upper and lower case.
CASED = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    r"\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    r"\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    r"\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    r"\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113"
    r"\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    r"\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    r"\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\x{10400}-\x{1044f}\x{104b0}-\x{104d3}"
    r"\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)


def _cased(upper: str, lower: str, after: str = "") -> str:
    """A pattern for words of upper-case and then lower-case letters, after one character and followed by `after`."""
    return rf"{BEFORE_WORD}{upper}*{lower}+{after}|{BEFORE_WORD}{upper}+{lower}*{after}"


DIGIT = r"\p{N}"
THREE_DIGITS = r"\p{N}{1,3}"
# Digits in groups of three from the right, the first with the text before the number, as llama.cpp does for AFMoE and Aya.
GROUPED_DIGITS = r"[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
GPT_2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{SYMBOLS}|{SPACES}"
LLAMA_3 = rf"{CONTRACTION}|{WORD}|{THREE_DIGITS}|{SYMBOLS}[\r\n]*|{LINES}"
QWEN_2 = rf"{CONTRACTION}|{WORD}|{DIGIT}|{SYMBOLS}[\r\n]*|{LINES}"
AFTER_WORDS = rf"{SYMBOLS}[\r\n/]*|{LINES}"
GPT_4O = rf"{_cased(UPPER, LOWER, CONTRACTION + '?')}|{THREE_DIGITS}|{AFTER_WORDS}"
DEEPSEEK_WORDS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
# Without the white space between U+0800 and U+4E00: U+1680, U+2000 to 200A, 2028, 2029, 202F, 205F and 3000.
DEEPSEEK_ASIAN = r"(?:(?!\s)[\u0800-\u9fa5\uac00-\ud7ff])+"
BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
NEWLINES = r"[^\n]+|\n+"
ASIAN = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    r"\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)

# The rules, each with llama.cpp's names for it; the first name is used for writing.
PRE_TOKENIZER_RULES: tuple[tuple[PreTokenizer, str], ...] = (
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", r"[0-9][0-9][0-9]")), "default"),
    (
        PreTokenizer((LLAMA_3,), ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (PreTokenizer((LLAMA_3,), ignore_merges=True), "glm4 glm5"),
    (PreTokenizer((LLAMA_3,)), "dbrx smaug-bpe chatglm-bpe"),
    (
        PreTokenizer((THREE_DIGITS, rf"{CONTRACTION}|{WORD}|\p{{N}}+|{SYMBOLS}[\r\n]*|{LINES}"), ignore_merges=True),
        "minicpm5",
    ),
    (
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{CASED}]+",
                r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
                r"\s+\z",
                DEEPSEEK_ASIAN,
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_ASIAN, DIGIT)), "deepseek-coder"),
    (PreTokenizer((THREE_DIGITS, CJK, rf"{DEEPSEEK_WORDS}[\r\n]*|{LINES}")), "deepseek-v3 hunyuan-dense hy_v4 joyai-llm"),
    (PreTokenizer((THREE_DIGITS, CJK, rf"{DEEPSEEK_WORDS}|[\r\n]|{SPACES}", DIGIT)), "spark2_5"),
    (PreTokenizer((GROUPED_DIGITS, ASIAN, rf"{DEEPSEEK_WORDS}[\r\n]*|{LINES}")), "afmoe"),
    (
        PreTokenizer(
            (
                r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
                rf"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{CJK}",
                rf"{_cased(ANY_CASE, ANY_CASE, CONTRACTION + '?')}|{DIGIT}|{AFTER_WORDS}",
            ),
            ignore_merges=True,
        ),
        "youtu",
    ),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT_2, r"[0-9][0-9][0-9]")), "falcon"),
    (PreTokenizer((DIGIT, GPT_2)), "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    (
        PreTokenizer((GPT_2,)),
        "gpt-2 mpt phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code"
        " roberta-bpe olmo jais exaone4 trillion granite-docling",
    ),
    (
        PreTokenizer(
            (
                rf"{CONTRACTION}|{WORD}|{THREE_DIGITS}|{SYMBOLS}[\r\n]*|\s*[\r\n]+"
                + "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
                + r"|\s{1,2}(?!\S)|\s",
            )
        ),
        "jais-2",
    ),
    (PreTokenizer((NEWLINES,), add_bos=True, spells_bytes=False), "gemma4 granite-embed-multi-311m"),
    (PreTokenizer((NEWLINES,), spells_bytes=False), "sarvam-moe"),
    (PreTokenizer((QWEN_2,)), "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan grok-2 solar-open"),
    (PreTokenizer((NEWLINES, QWEN_2)), "laguna"),
    (
        PreTokenizer((rf"{CONTRACTION}|{BEFORE_WORD}{ANY_CASE}+|{DIGIT}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES}",)),
        "qwen35",
    ),
    (PreTokenizer((BLOOM,)), "poro-chat bloom gpt3-finnish"),
    (PreTokenizer((BLOOM, DIGIT)), "viking"),
    (PreTokenizer((rf"{_cased(UPPER, LOWER)}|{DIGIT}|{AFTER_WORDS}",), ignore_merges=True, add_bos=True), "tekken"),
    (
        PreTokenizer(
            (
                rf"{CONTRACTION}|{BEFORE_WORD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{DIGIT}|{SYMBOLS}[\r\n/]?"
                rf"|\s*[\r\n]|{SPACES}",
            )
        ),
        "exaone-moe",
    ),
    (
        PreTokenizer(
            (r"<sentinel:[0-9]+>", r"IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", DIGIT, r"[\p{P}!-/:-@\[-`{-~]", GPT_2),
            add_bos=True,
        ),
        "chameleon",
    ),
    (PreTokenizer((GPT_4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (
        PreTokenizer(
            (rf"{_cased(UPPER_MARKED, LOWER_MARKED, CONTRACTION + '?')}|{THREE_DIGITS}|{AFTER_WORDS}",), ignore_merges=True
        ),
        "granite-embed-multi-97m",
    ),
    (
        PreTokenizer(
            (GROUPED_DIGITS, rf"{_cased(ANY_CASE, ANY_CASE, CONTRACTION + '?')}|{THREE_DIGITS}|{AFTER_WORDS}"),
        ),
        "tiny_aya cohere2moe",
    ),
    (PreTokenizer((r"\p{N}+", r"(?=(?:[0-9]{3})+(?![0-9]))")), "superbpe"),
    (
        PreTokenizer(
            (rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{WORD}|{DIGIT}|{SYMBOLS}[\r\n]*|\s*[\r\n]|{SPACES}",),
        ),
        "bailingmoe bailingmoe2 llada-moe",
    ),
    (PreTokenizer((rf"{CONTRACTION}|{WORD}|{DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{LINES}",)), "seed-coder"),
    (
        PreTokenizer(
            (rf"[{HAN}]+|{BEFORE_WORD}(?:(?![{HAN}])\p{{L}})+{CONTRACTION}?|{THREE_DIGITS}|{SYMBOLS}[\r\n]*|{LINES}",)
        ),
        "kimi-k2",
    ),
    (PreTokenizer((rf"{WORD}|{DIGIT}|{SYMBOLS}[\r\n]*|{LINES}",)), "ufakzeka"),
    (PreTokenizer((r"\S+",), spells_bytes=False), "whitespace"),
)
PRE_TOKENIZERS = {name: rule for rule, names in PRE_TOKENIZER_RULES for name in names.split()}

# Characters that got a category in Unicode 16, and unassigned ones between them.
AFTER_UNICODE_15 = (
    r"\u0897\u1b4e\u1b4f\u1b7f\u1c89\u1c8a\u2427-\u2429\u31e4\u31e5\ua7cb-\ua7cd\ua7da-\ua7dc\x{105c0}-\x{105f3}"
    r"\x{10d40}-\x{10d8f}\x{10ec2}-\x{10efc}\x{11380}-\x{113e2}\x{116d0}-\x{116e3}\x{11bc0}-\x{11bf9}\x{11f5a}"
    r"\x{13460}-\x{143fa}\x{16100}-\x{16139}\x{16d40}-\x{16d79}\x{18cff}\x{1cc00}-\x{1ceb3}\x{1e5d0}-\x{1e5ff}"
    r"\x{1f8b2}-\x{1f8c1}\x{1fa89}-\x{1fa8f}\x{1fabe}\x{1fac6}\x{1fadc}-\x{1fadf}\x{1fae9}\x{1fbcb}-\x{1fbef}"
)


def build_pre_tokenizer(pre: PreTokenizer) -> Library:
    """The pre-tokenizer as the tokenizers library runs it."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[Library] = [pre_tokenizers.Split(Regex(_as_of_15(pattern)), "isolated") for pattern in pre.patterns]
    if pre.spells_bytes:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _as_of_15(pattern: str) -> str:
    """The pattern, with categories as of Unicode 15.1."""
    return re.sub(r"\\p{[A-Z]}", lambda match: rf"[{match[0]}&&[^{AFTER_UNICODE_15}]]", pattern)


def pre_tokenizer_name(described: Mapping[str, Any] | None, ignore_merges: bool) -> str | None:
    """llama.cpp's name of the pre-tokenizer that a tokenizer.json describes, or None if there is none.

    Args:
      ignore_merges: setting of the file's model.
    """
    patterns: list[str] = []
    for step in _pre_tokenizer_steps(described):
        step_type = step["type"]
        if step_type == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
            patterns.append(step["pattern"]["Regex"])
        elif step_type == "ByteLevel" and not step["add_prefix_space"]:
            patterns += [GPT_2] * step.get("use_regex", True)
        elif step_type == "Digits":
            patterns.append(DIGIT if step["individual_digits"] else r"\p{N}+")
        else:
            return None
    rule = [_canonical_pattern(pattern) for pattern in patterns], ignore_merges
    for name, pre in PRE_TOKENIZERS.items():
        if pre.spells_bytes and ([_canonical_pattern(pattern) for pattern in pre.patterns], pre.ignore_merges) == rule:
            return name
    return None


def _pre_tokenizer_steps(described: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if described is None:
        return []
    return described["pretokenizers"] if described["type"] == "Sequence" else [described]


# Published patterns that are written differently in llama.cpp.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PUBLISHED_PATTERNS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)": CONTRACTION,
    _cased(_UPPER, _LOWER, CONTRACTION + "?"): _cased(UPPER, LOWER, CONTRACTION + "?"),
    _cased(_UPPER, _LOWER): _cased(UPPER, LOWER),
}


def _canonical_pattern(pattern: str) -> str:
    """A pattern in a canonical spelling, the same for equivalent patterns."""
    pattern = re.sub(rf"\[(\\p{{[A-Z]}})&&\[\^{re.escape(AFTER_UNICODE_15)}\]\]", r"\1", pattern)
    pattern = re.sub(r"\\(?:u([0-9a-f]{4})|x{([0-9a-f]+)})", lambda match: chr(int(match[1] or match[2], 16)), pattern)
    pattern = pattern.replace("\r", r"\r").replace("\n", r"\n")
    for published, ours in PUBLISHED_PATTERNS.items():
        pattern = pattern.replace(published, ours)
    return pattern
