"""Chat templates of three families, as small as they can be and still behave like theirs, over one-letter tokens."""

from __future__ import annotations

from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_tokenizer

# As ChatML: a header, the text, the end of a turn (which is EOS), a line break (here a space) after every turn.
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As Llama: BOS first, system and user turns in one pair of marks, EOS after answers only, alternation enforced.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}<|user|>{{ m.content }}<|assistant|>{% else %}{{ m.content }}<eos>{% endif %}"
    "{% endfor %}"
)
# As models that think: the last answer alone keeps what the others have lost. Not prefix-stable over several answers.
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and loop.last %}zz{% endif %}{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Writes answers without the header that the generation prompt has. Never prefix-stable.
HEADLESS = (
    "{% for m in messages %}{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

USER, ASSISTANT, SYSTEM = "<|user|>", "<|assistant|>", "<|system|>"


def chat_tokenizer(template: str | None, bos: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each role's header; with `bos`, its own encoding begins with <bos>."""
    tokenizer = tiny_tokenizer(bos=bos)
    headers = [AddedToken(token, special=True, normalized=False) for token in (USER, ASSISTANT, SYSTEM)]
    tokenizer.add_tokens(headers, special_tokens=True)
    if bos:
        start = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)])
        tokenizer.backend_tokenizer.post_processor = start
    tokenizer.chat_template = template
    return tokenizer


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def shown(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    """Ids as the text that they stand for, special tokens included."""
    return str(tokenizer.decode(ids, skip_special_tokens=False))
