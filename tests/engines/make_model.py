"""Makes the small model of the tiers `engines` and `engines-vllm`. No tier runs this script: the result is committed as tiny.gguf.

    python make_model.py ROLLOUTS.jsonl FOLDER [STEPS]      needs torch and transformers
    python to_gguf.py FOLDER tiny.gguf

ROLLOUTS.jsonl has the scored rows of the quickstart, whose policy is a script. Those with reward 1 are the training data. The tokenizer
and the weights are trained here, so the model has no other origin. The committed one took 280 steps, about three minutes on one core.
The model calls the right tools with valid JSON, and ends its turns. It can neither calculate nor copy, so most of its rewards are 0.
"""

import json
import pathlib
import random
import sys

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CONTEXT = 4_096
# A longer conversation would make its whole batch as long.
TOKENS_MAX = 1_400
BATCH = 8
RATE = 3e-3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
# That of Qwen2: llama.cpp has it under the name `qwen2`.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def text(content):
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def message(item):
    """An item of a response as a message of the chat template."""
    match item["type"]:
        case "message":
            return {"role": "assistant", "content": text(item["content"])}
        case "function_call":
            function = {"name": item["name"], "arguments": json.loads(item["arguments"])}
            return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        case "function_call_output":
            return {"role": "tool", "content": text(item["output"])}


def conversation(row):
    """The messages and the tools of a row, or None if the script wrote a call that is no JSON."""
    params = row["responses_create_params"]
    first = [{"role": item["role"], "content": text(item["content"])} for item in params["input"]]
    without = lambda tool: {key: value for key, value in tool.items() if key not in ("type", "strict")}
    tools = [{"type": "function", "function": without(tool)} for tool in params.get("tools") or []]
    try:
        return first + [made for made in map(message, row["response"]["output"]) if made], tools or None
    except ValueError:
        return None


def make_tokenizer(conversations):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    texts = [entry["content"] + "\n" + json.dumps(entry.get("tool_calls", "")) for messages, _ in conversations for entry in messages]
    texts += [json.dumps(tools) for _, tools in conversations if tools]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=1_500, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   clean_up_tokenization_spaces=False, model_max_length=CONTEXT)
    made.chat_template = (pathlib.Path(__file__).parent / "chat_template.jinja").read_text()
    return made


def make_model(tokenizer):
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=(len(tokenizer) + 63) // 64 * 64, hidden_size=192, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        intermediate_size=512, max_position_embeddings=CONTEXT, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype="float32"))


def with_mask(tokenizer, messages, tools):
    """The token ids of a conversation, and which of them the assistant writes."""
    ids = tokenizer(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False), add_special_tokens=False)["input_ids"]
    begin = [tokenizer.convert_tokens_to_ids("<|im_start|>"), *tokenizer("assistant\n", add_special_tokens=False)["input_ids"]]
    mask, writes, at = [0] * len(ids), False, 0
    while at < len(ids):
        if not writes and ids[at:at + len(begin)] == begin:
            writes, at = True, at + len(begin)
            continue
        mask[at] = int(writes)
        writes = writes and ids[at] != tokenizer.eos_token_id
        at += 1
    return ids, mask


def batches(data):
    """Batches without end. Conversations of about the same length are in one batch."""
    while True:
        order = sorted(data, key=lambda entry: len(entry[0]) + random.random() * 60)
        found = [order[at:at + BATCH] for at in range(0, len(order) - BATCH + 1, BATCH)]
        yield from random.sample(found, len(found))


def train(model, data, padding, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, betas=(0.9, 0.98))
    for step, batch in zip(range(steps), batches(data)):
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [padding] * (width - len(ids)) for ids, _ in batch])
        used = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in batch])
        written = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in batch])
        done = step / steps
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 30) * (1 if done < 0.6 else max(0.05, (1 - done) / 0.4))
        logits = model(ids, attention_mask=used).logits[:, :-1].flatten(0, 1)
        loss = lambda mask: torch.nn.functional.cross_entropy(logits, ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100).flatten(), ignore_index=-100)
        answer, everything = loss(written), loss(used)
        optimizer.zero_grad()
        # The prompts count a little: they show what the words of the environments are.
        (answer + 0.3 * everything).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss of the answers {answer.item():.3f}, of everything {everything.item():.3f}", flush=True)


def main():
    rollouts, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 280
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with open(rollouts) as file:
        rows = [json.loads(line) for line in file]
    conversations = [made for made in map(conversation, (row for row in rows if row["reward"] == 1)) if made]
    tokenizer = make_tokenizer(conversations)
    model = make_model(tokenizer)
    data = [made for made in (with_mask(tokenizer, *talk) for talk in conversations) if len(made[0]) <= TOKENS_MAX]
    parameters = sum(part.numel() for part in model.parameters()) / 1e6
    print(f"{len(data)} conversations, {parameters:.1f} M parameters, {len(tokenizer)} tokens", flush=True)
    train(model, data, tokenizer.pad_token_id, steps)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
