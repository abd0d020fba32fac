"""Conversations become tokens of which only what the data says is a target."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from data.corpora import MARKED, MARKED_SHORT, PLAIN, REFUSING, REWRITING, byte_tokenizer
from isoloss.batch.document import IGNORE_INDEX, Document
from isoloss.data.errors import RowError
from isoloss.data.tokenising import Tokeniser


def turn(role: str, content: str, **extra: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **extra}


CHAT = [turn("user", "Hi"), turn("assistant", "Hello"), turn("user", "2+2?"), turn("assistant", "4")]


def document(row: dict[str, Any], template: str | None = PLAIN, loss_on: str = "assistant") -> Document:
    return Tokeniser(byte_tokenizer(template), loss_on).document(row, 0)  # type: ignore[arg-type]


def targets(made: Document, tokenizer: Any = None) -> str:
    """The characters of the targets."""
    ids = made.input_ids if made.labels is None else [label for label in made.labels if label != IGNORE_INDEX]
    return str((tokenizer or byte_tokenizer()).decode(ids))


def weights(made: Document) -> list[tuple[float, str]]:
    """Each run of characters with one weight, where they are targets."""
    tokenizer = byte_tokenizer()
    labels = made.input_ids if made.labels is None else made.labels
    values = [made.weight] * len(made) if isinstance(made.weight, float) else made.weight.tolist()  # type: ignore[union-attr]
    runs: list[tuple[float, list[int]]] = []
    before = IGNORE_INDEX
    for label, value in zip(labels, values, strict=True):
        if label != IGNORE_INDEX:
            if before == IGNORE_INDEX or runs[-1][0] != value:
                runs.append((value, []))
            runs[-1][1].append(int(label))
        before = label
    return [(round(value, 6), tokenizer.decode(ids)) for value, ids in runs]


@pytest.mark.parametrize("template", [PLAIN, MARKED, MARKED_SHORT])
def test_only_answers_and_their_end_of_turn_are_targets(template: str) -> None:
    made = document({"messages": CHAT}, template)
    assert targets(made) == "Hello<|im_end|>4<|im_end|>"
    text = byte_tokenizer(template).apply_chat_template(CHAT, tokenize=False)
    assert byte_tokenizer().decode(made.input_ids) == text


@pytest.mark.parametrize("template", [PLAIN, MARKED, MARKED_SHORT])
def test_what_is_trained_can_be_chosen(template: str) -> None:
    assert targets(document({"messages": CHAT}, template, "completion")) == "4<|im_end|>"
    whole = document({"messages": CHAT}, template, "all")
    assert whole.labels is None
    halves = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    for loss_on in ("assistant", "completion"):
        assert targets(document(halves, template, loss_on)) == "4<|im_end|>"
    longer = {"prompt": CHAT[:1], "completion": CHAT[1:]}
    assert targets(document(longer, template, "completion")) == "Hello<|im_end|>4<|im_end|>"


@given(
    st.lists(
        st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text("aü \n😀", max_size=6)),
        max_size=6,
    )
)
def test_markers_and_prefixes_find_the_same_targets(parts: list[tuple[str, str]]) -> None:
    """Also the same as the mask that transformers makes from the markers."""
    messages = [turn(role, content) for role, content in [*parts, ("user", "?"), ("assistant", "a")]]
    plain, marked = (document({"messages": messages}, template) for template in (PLAIN, MARKED))
    assert plain.input_ids.tolist() == marked.input_ids.tolist()  # type: ignore[union-attr]
    assert plain.labels.tolist() == marked.labels.tolist()  # type: ignore[union-attr]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert targets(plain) == "".join(f"{answer}<|im_end|>" for answer in answers)
    theirs = byte_tokenizer(MARKED).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    expected = [
        token if wanted else IGNORE_INDEX
        for token, wanted in zip(theirs["input_ids"], theirs["assistant_masks"], strict=True)
    ]
    assert marked.labels.tolist() == expected  # type: ignore[union-attr]


def test_markers_that_mark_nothing_are_an_error() -> None:
    """transformers returns a mask of zeros and says nothing; a run would train on nothing."""
    template = MARKED.replace("{% if m['role'] == 'assistant' %}", "{% if m['role'] == 'model' %}")
    with pytest.raises(RowError, match="marks nothing in this conversation"):
        document({"messages": CHAT}, template)


def test_a_template_that_rewrites_earlier_turns_is_an_error_that_names_the_turn() -> None:
    messages = [
        turn("user", "a"),
        turn("assistant", "<think>b</think>c"),
        turn("user", "d"),
        turn("assistant", "e"),
    ]
    with pytest.raises(
        RowError, match=r"messages\[1\].*differently once more turns follow.*generation.*completion"
    ):
        document({"messages": messages}, REWRITING)
    assert targets(document({"messages": messages}, REWRITING, "completion")) == "e<|im_end|>"


def test_an_opening_that_the_answer_does_not_have_is_an_error_that_shows_it() -> None:
    template = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    with pytest.raises(RowError, match=r"messages\[1\]: the chat template opens an answer with .*<think>"):
        document({"messages": CHAT}, template)


@pytest.mark.parametrize("template", [PLAIN, MARKED, MARKED_SHORT])
def test_messages_may_say_whether_and_how_much_they_are_trained(template: str) -> None:
    messages = [
        turn("user", "q"),
        turn("assistant", "one", loss=False),
        turn("assistant", "two", weight=0.5),
        turn("assistant", "three", weight=0),
        turn("assistant", "four", loss=True, weight=2),
        turn("assistant", "five"),
    ]
    made = document({"messages": messages, "weight": 3}, template)
    assert weights(made) == [(1.5, "two<|im_end|>"), (6.0, "four<|im_end|>"), (3.0, "five<|im_end|>")]
    text = byte_tokenizer(template).apply_chat_template(
        [turn(message["role"], message["content"]) for message in messages], tokenize=False
    )
    assert byte_tokenizer().decode(made.input_ids) == text  # the template does not see loss and weight


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_message_that_is_no_answer_is_trained_when_it_says_so(template: str) -> None:
    messages = [turn("system", "s"), turn("user", "q", loss=True), turn("assistant", "a")]
    made = document({"messages": messages}, template)
    assert targets(made) == "<|im_start|>user\nq<|im_end|>a<|im_end|>"


def test_a_message_may_be_left_out_where_all_are_trained() -> None:
    messages = [
        turn("user", "q"),
        turn("assistant", "a", loss=False),
        turn("user", "r"),
        turn("assistant", "b"),
    ]
    made = document({"messages": messages}, PLAIN, "all")
    assert targets(made) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n\n<|im_start|>user\nr<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n"
    )


THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% if m.thought is defined %}{% generation %}{{ m.thought }}{% endgeneration %}{{ '|' }}{% endif %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)


def test_marked_blocks_belong_to_the_message_that_they_stand_in() -> None:
    """Counting blocks alone would mix them up where one answer has two."""
    messages = [turn("user", "q"), turn("assistant", "b", thought="a"), turn("assistant", "c", weight=0.5)]
    made = document({"messages": messages}, THINKING)
    assert weights(made) == [(1.0, "a"), (1.0, "b<|im_end|>"), (0.5, "c<|im_end|>")]


def test_an_answer_that_a_template_leaves_unmarked_is_no_target_whatever_the_others_weigh() -> None:
    template = MARKED.replace(
        "m['role'] == 'assistant'", "m['role'] == 'assistant' and m.shown is not defined"
    )
    for weight in (1, 0.5):
        messages = [turn("user", "q"), turn("assistant", "a", shown=0), turn("assistant", "b", weight=weight)]
        assert weights(document({"messages": messages}, template)) == [(weight, "b<|im_end|>")]


def test_a_conversation_may_start_with_an_answer() -> None:
    system = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
    for template in (PLAIN, system + PLAIN):
        made = document({"messages": [turn("assistant", "Hi"), *CHAT]}, template)
        assert targets(made) == "Hi<|im_end|>Hello<|im_end|>4<|im_end|>"
    silent = PLAIN[: PLAIN.index("{% if add_generation_prompt")]
    with pytest.raises(RowError, match=r"messages\[0\]: the conversation starts with an answer"):
        document({"messages": [turn("assistant", "Hi"), *CHAT]}, silent)


def test_white_space_ends_a_turn_where_no_token_does() -> None:
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    assert targets(document({"messages": CHAT}, template)) == "Hello\n\n4\n\n"


@pytest.mark.parametrize("template", [None, {"other": PLAIN}])
def test_a_tokenizer_without_chat_template_is_an_error_that_names_the_key(template: Any) -> None:
    with pytest.raises(RowError, match=r"no chat template.*data\.chat_template"):
        document({"messages": CHAT}, template)


def test_of_several_templates_the_default_one_is_used() -> None:
    made = document({"messages": CHAT}, {"default": PLAIN, "other": REFUSING})  # type: ignore[arg-type]
    assert targets(made) == "Hello<|im_end|>4<|im_end|>"


def test_what_a_template_refuses_is_an_error_with_its_words() -> None:
    with pytest.raises(
        RowError, match="the chat template refuses the messages: only user and assistant turns"
    ):
        document({"messages": CHAT}, REFUSING)


def test_parts_are_not_trained_as_the_text_of_a_python_list() -> None:
    parts = [{"type": "text", "text": "hello"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "a"}]}
    with pytest.raises(RowError, match=r"messages\[0\]\.content is a list of parts.*data\.chat_template"):
        Tokeniser(byte_tokenizer(PLAIN), "assistant").document(row, 0)
    content = "m['content'] if m['content'] is string else m['content'][0]['text']"
    knows_parts = PLAIN.replace("m['content']", content)
    document = Tokeniser(byte_tokenizer(knows_parts), "assistant").document(row, 0)
    assert "hello" in byte_tokenizer().decode(document.input_ids)


def test_tools_reach_the_template() -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN
    tools = [{"type": "function", "function": {"name": "add"}}]
    for given_tools in (tools, '[{"type": "function", "function": {"name": "add"}}]'):
        made = document({"messages": CHAT, "tools": given_tools}, template)
        assert byte_tokenizer().decode(made.input_ids).startswith('[{"type": "function"')
        assert targets(made) == "Hello<|im_end|>4<|im_end|>"


def merging_tokenizer(*, trim_offsets: bool) -> PreTrainedTokenizerFast:
    """Tokens of several characters; with `trim_offsets` white space at their edges is not counted."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["def f(x):\n    return x\n\n\n        y\n" * 30], trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    made.chat_template = PLAIN
    return made


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_no_target_is_lost_where_offsets_leave_out_white_space(trim_offsets: bool) -> None:
    tokenizer = merging_tokenizer(trim_offsets=trim_offsets)
    code = "def f(x):\n    return x\n\n\n        y"
    messages = [turn("user", code), turn("assistant", code)]
    made = Tokeniser(tokenizer, "assistant").document({"messages": messages}, 0)
    assert targets(made, tokenizer) == code + "<|im_end|>"


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_completions_are_targets_and_prompts_are_not(trim_offsets: bool) -> None:
    tokenizer = merging_tokenizer(trim_offsets=trim_offsets)
    row = {"prompt": "def f(x):\n", "completion": "    return x"}
    for loss_on in ("assistant", "completion"):
        made = Tokeniser(tokenizer, loss_on).document(row, 0)  # type: ignore[arg-type]
        found = targets(made, tokenizer)
        assert found.strip("\n") == "    return x<|im_end|>"  # the token of the seam holds the line break too
    assert Tokeniser(tokenizer, "all").document(row, 0).labels is None


def test_a_token_over_the_seam_of_prompt_and_completion_is_a_target() -> None:
    """Left out, the only token of the completion would never be learned."""
    tokenizer = merging_tokenizer(trim_offsets=False)
    made = Tokeniser(tokenizer, "completion").document(
        {"prompt": "def f(x):\n    ", "completion": "return"}, 0
    )
    assert targets(made, tokenizer) == " return<|im_end|>"


def test_a_slow_tokenizer_is_refused_where_characters_matter() -> None:
    class Slow(PreTrainedTokenizerFast):
        @property
        def is_fast(self) -> bool:
            return False

    fast = byte_tokenizer()
    slow = Slow(tokenizer_object=fast.backend_tokenizer, eos_token="<|im_end|>")
    with pytest.raises(ValueError, match=r"data\.tokenizer is a slow tokenizer"):
        Tokeniser(slow, "completion").document({"prompt": "a", "completion": "b"}, 0)


def test_text_ends_with_one_end_of_text_token() -> None:
    tokenizer = byte_tokenizer()
    for text in ("ab", "ab<|im_end|>"):
        made = Tokeniser(tokenizer, "assistant").document({"text": text}, 3)
        assert tokenizer.decode(made.input_ids) == "ab<|im_end|>"
        assert made.labels is None
        assert made.source == 3
    endless = byte_tokenizer()
    endless.eos_token = None
    assert endless.decode(Tokeniser(endless, "assistant").document({"text": "ab"}, 0).input_ids) == "ab"


def test_a_tokenizer_that_adds_its_own_special_tokens_ends_a_completion_once() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[
            (token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|im_end|>")
        ],
    )
    made = Tokeniser(tokenizer, "completion").document({"prompt": "a", "completion": "b"}, 0)
    assert tokenizer.decode(made.input_ids) == "<|im_start|>ab<|im_end|>"
    assert targets(made) == "b<|im_end|>"


def test_tokens_keep_their_labels() -> None:
    labels = [IGNORE_INDEX, IGNORE_INDEX, 7]
    made = Tokeniser(byte_tokenizer(), "assistant").document({"input_ids": [5, 6, 7], "labels": labels}, 0)
    assert made.input_ids.tolist() == [5, 6, 7]  # type: ignore[union-attr]
    assert made.labels.tolist() == labels  # type: ignore[union-attr]
    assert Tokeniser(byte_tokenizer(), "assistant").document({"input_ids": [5, 6]}, 0).labels is None


def test_a41_the_weight_of_an_example_belongs_to_each_of_its_targets() -> None:
    """A41: one weight per row, whatever window and layout its tokens end up in."""
    made = Tokeniser(byte_tokenizer(), "assistant").document({"text": "ab", "weight": 2}, 0)
    assert made.weight == 2.0
