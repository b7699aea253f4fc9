"""The settings in the files next to a vocabulary: Hugging Face's ``tokenizer_config.json`` and related ones."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from llama_jax.errors import TokenizerError, short_repr
from llama_jax.storage import Location
from llama_jax.storage.paths import read_object, read_text
from llama_jax.tokenizers.interface import MAX_TOKEN_ID, Tokenizer

# Keys of ``tokenizer_config.json`` that `Settings` has fields for, or that concern a single file or program.
OWN_SETTINGS = {"bos_token", "eos_token", "pad_token", "add_bos_token", "add_eos_token", "chat_template"}
OWN_SETTINGS |= {"added_tokens_decoder"}
PER_FILE_SETTINGS = {"tokenizer_class", "auto_map", "from_slow", "name_or_path", "tokenizer_file", "special_tokens_map_file"}
TEMPLATE_FOLDER = "additional_chat_templates"
GGUF_SETTINGS = "gguf"  # key of a saved file for settings of a GGUF vocabulary that have no other key


class AddedToken(NamedTuple):
    """A token added to a vocabulary; a special one is not shown, and no user text is encoded as it."""

    text: str
    id: int
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class Settings:
    """The settings that are not in a vocabulary itself; empty by default.

    Attributes:
      bos_token, eos_token: texts of the begin- and end-of-sequence tokens.
      pad_token, pad_id: text and id of the padding token; -1 for none.
      stop_ids: tokens that end a reply.
      all_stop_ids: whether `stop_ids` is complete.
      add_bos, add_eos: whether a text begins with the BOS, and ends with the EOS.
      chat_template: the Jinja chat template.
      chat_templates: additional templates by name, such as "tool_use".
      added_tokens: tokens added to the vocabulary.
      extra_tokens: texts of additional special tokens, which may be missing in a ``tokenizer.json``.
      add_prefix_space: whether a text begins with a space, for which transformers' Llama tokenizer uses only this.
      gguf: scalar fields of a GGUF's vocabulary, by key.
      other_settings: other settings of ``tokenizer_config.json``, which are saved unchanged.
    """

    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    pad_id: int = -1
    stop_ids: tuple[int, ...] = ()
    all_stop_ids: bool = False
    add_bos: bool | None = None
    add_eos: bool | None = None
    chat_template: str | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    added_tokens: tuple[AddedToken, ...] = ()
    extra_tokens: tuple[str, ...] = ()
    add_prefix_space: bool | None = None
    gguf: Mapping[str, Any] = field(default_factory=dict)
    other_settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens_by_name(self) -> dict[str, str]:
        """Texts of the tokens with a name, such as pad_token and image_token."""
        extra = self.other_settings.get("extra_special_tokens")
        tokens = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "pad_token": self.pad_token,
            **{name: token for name, token in self.other_settings.items() if name.endswith("_token")},
            **(extra if isinstance(extra, dict) else {}),
        }
        texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
        return {name: text for name, text in texts.items() if text and isinstance(text, str)}

    @property
    def named_tokens(self) -> tuple[str, ...]:
        """Texts of the tokens with a name, which are special; of a GGUF's vocabulary, where the tokens have kinds, only BOS
        and EOS."""
        return tuple(t for name, t in self.tokens_by_name.items() if not self.gguf or name in ("bos_token", "eos_token"))


def read_settings(folder: Location) -> Settings:
    """The settings in a folder in transformers' format; empty if it has no such files.

    They are read from ``tokenizer_config.json`` and, for missing fields, ``special_tokens_map.json`` and
    ``added_tokens.json``; ``chat_template.jinja`` and the files in ``additional_chat_templates`` take precedence. End tokens
    are read from ``generation_config.json``, else ``config.json``; a list in a ``generation_config.json`` that also names
    the BOS is complete (`Tokenizer.stop_ids`).
    """
    config = _read_json(folder / "tokenizer_config.json")
    names = _read_json(folder / "special_tokens_map.json") | config
    generation, model = _read_json(folder / "generation_config.json"), _read_json(folder / "config.json")
    listed = isinstance(generation.get("eos_token_id"), list) and "bos_token_id" in generation
    if generation.get("eos_token_id") is None:
        generation = model | {key: value for key, value in generation.items() if value is not None}
    where = str(folder)
    template_file = folder / "chat_template.jinja"
    templates = _templates(where, config.get("chat_template")) | _template_files(folder)
    template = read_text(template_file, TokenizerError) if template_file.is_file() else templates.pop("default", None)
    pad = generation.get("pad_token_id")
    is_llamas = config.get("tokenizer_class") in ("LlamaTokenizer", "LlamaTokenizerFast")
    settings = Settings(
        bos_token=_token_text(where, "bos_token", names.get("bos_token")),
        eos_token=_token_text(where, "eos_token", names.get("eos_token")),
        pad_token=_token_text(where, "pad_token", names.get("pad_token")),
        pad_id=pad if type(pad) is int and 0 <= pad < MAX_TOKEN_ID else -1,  # old files have -1 for none
        stop_ids=_ids(where, "eos_token_id", generation.get("eos_token_id")),
        all_stop_ids=listed,
        add_bos=_flag(where, "add_bos_token", config.get("add_bos_token")),
        add_eos=_flag(where, "add_eos_token", config.get("add_eos_token")),
        chat_template=template,
        chat_templates={name: text for name, text in templates.items() if name != "default"},
        gguf=_scalars(where, config.get(GGUF_SETTINGS)),
        other_settings={
            name: value for name, value in names.items() if name not in OWN_SETTINGS | PER_FILE_SETTINGS | {GGUF_SETTINGS}
        },
        extra_tokens=_extra_tokens(where, names),
        add_prefix_space=_flag(where, "add_prefix_space", config.get("add_prefix_space")) if is_llamas else None,
    )
    by_id, by_text = config.get("added_tokens_decoder"), _read_json(folder / "added_tokens.json")
    special = {*settings.named_tokens, *settings.extra_tokens}
    return replace(settings, added_tokens=_added_tokens(where, by_id, by_text, special))


def write_settings(folder: Path, tokenizer: Tokenizer, settings: Settings, tokenizer_class: str) -> None:
    """Write the files that `read_settings` reads; `tokenizer_class` is the name of transformers' class."""
    names = {token: name for name, token in tokenizer.special_tokens.items()}
    template: Any = tokenizer.chat_template
    if settings.chat_templates:
        templates = dict(settings.chat_templates) | ({} if template is None else {"default": template})
        template = [{"name": name, "template": text} for name, text in templates.items()]
    config = {
        "tokenizer_class": tokenizer_class,
        "bos_token": names.get(tokenizer.bos_id),
        "eos_token": names.get(tokenizer.eos_id),
        "pad_token": settings.pad_token,
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": tokenizer.add_eos,
        "chat_template": template,
        GGUF_SETTINGS: settings.gguf or None,
        **settings.other_settings,
    }
    # A list together with a BOS is complete, see `read_settings`; an assumed stop at the BOS is not written.
    assumed = not settings.all_stop_ids and tokenizer.bos_id not in settings.stop_ids
    ends = [token for token in tokenizer.stop_ids if not (assumed and token == tokenizer.bos_id)]
    single = assumed and len(ends) == 1
    ids = {"bos": -1 if assumed and not single else tokenizer.bos_id, "eos": ends[0] if single else ends}
    ids["pad"] = pad_id_of(tokenizer, settings)
    generation = {f"{name}_token_id": token for name, token in ids.items() if token != -1}
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        text = json.dumps({key: value for key, value in content.items() if value is not None}, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def pad_id_of(tokenizer: Tokenizer, settings: Settings) -> int:
    """The id of the padding token, or -1."""
    pad = tokenizer.special_tokens.get(settings.pad_token or "", settings.pad_id)
    return pad if pad < tokenizer.vocab_size else -1


def _read_json(path: Location) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    return read_object(path, TokenizerError) if path.is_file() else {}


def _token_text(where: str, name: str, value: Any) -> str | None:
    """The text of a token, which is given as a string, or as an object with its text under "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value
    _refuse_setting(where, name, value, "a text")


def _flag(where: str, name: str, value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    _refuse_setting(where, name, value, "true or false")


def _ids(where: str, name: str, value: Any) -> tuple[int, ...]:
    """The ids from one id, a list of ids, or None."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < MAX_TOKEN_ID for token in ids):
        _refuse_setting(where, name, value, "a token id or a list of them")
    return tuple(ids)


def _templates(where: str, value: Any) -> dict[str, str]:
    """Chat templates by name; a single one is the "default"."""
    if isinstance(value, list):
        templates: dict[Any, Any] = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    else:
        templates = {} if value is None else {"default": value}
    if all(isinstance(text, str) for text in (*templates, *templates.values())):
        return templates
    _refuse_setting(where, "chat_template", value, "a text")


def _template_files(folder: Location) -> dict[str, str]:
    """The additional templates in a folder, by the names of their files."""
    folder = folder / TEMPLATE_FOLDER
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    suffix = ".jinja"
    return {
        name.removesuffix(suffix): read_text(folder / name, TokenizerError)
        for name in sorted(names)
        if name.endswith(suffix)
    }


def _extra_tokens(where: str, names: dict[str, Any]) -> tuple[str, ...]:
    """The special tokens without a role, else those under the older key; in an object the keys are roles."""
    name = "extra_special_tokens" if "extra_special_tokens" in names else "additional_special_tokens"
    value = names.get(name) or []
    if not isinstance(value, list | dict):
        _refuse_setting(where, name, value, "texts")
    texts = [_token_text(where, name, token) for token in (value.values() if isinstance(value, dict) else value)]
    return tuple(dict.fromkeys(filter(None, texts)))


def _scalars(where: str, value: Any) -> dict[str, Any]:
    """The scalar settings of a saved GGUF vocabulary."""
    scalars = {} if value is None else value
    if isinstance(scalars, dict) and all(type(scalar) in (bool, int, float, str) for scalar in scalars.values()):
        return scalars
    _refuse_setting(where, GGUF_SETTINGS, value, "an object of texts and numbers")


def _added_tokens(where: str, by_id: Any, by_text: dict[str, Any], special: Collection[str]) -> tuple[AddedToken, ...]:
    """{"32000": {"content": "<|im_start|>", "special": true}}, or in older folders {"<|im_start|>": 32000}.

    Args:
      special: the special tokens of an older folder, which has no flags.
    """
    try:
        older = {
            _id(number): AddedToken(text, _id(number), text in special, normalized=text not in special)
            for text, number in by_text.items()
        }
        newer = {
            _id(number): AddedToken(
                str(token["content"]), _id(number), *(bool(token.get(name)) for name in AddedToken._fields[2:])
            )
            for number, token in (by_id or {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        _refuse_setting(where, "added tokens", by_id or by_text, "tokens with ids")
    return tuple(token for _, token in sorted((older | newer).items()))


def _id(number: Any) -> int:
    token_id = int(number)
    if not 0 <= token_id < MAX_TOKEN_ID:  # larger ones can be chosen so that their hashes collide
        raise ValueError(f"an id of {short_repr(token_id)}")
    return token_id


def _refuse_setting(where: str, name: str, value: Any, need: str) -> NoReturn:
    raise TokenizerError(f"{where}: {name}={short_repr(value)} must be {need}; copy the tokenizer's files again") from None
