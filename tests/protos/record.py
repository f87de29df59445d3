"""Records messages and descriptors as the programs of one revision send them, for tests of all later ones.

    git archive REVISION protos | tar x -C FOLDER
    PYTHONPATH=FOLDER python tests/protos/record.py tests/protos/recorded/REVISION

A record is made once, when its revision's successor changes `protos/`, and then never again. The messages are written
with the generated modules alone: what today's codec would write says nothing of what was written then.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.protobuf.message import Message

from protos.speculation.v1 import draft_pb2, target_pb2, types_pb2


def messages() -> dict[str, Message]:
    sampling = types_pb2.SamplingParams(
        temperature=0.7,
        top_k=50,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias_token_ids=[7, 4294967295],
        logit_bias_values=[-100.0, 2.5],
    )
    model = types_pb2.ModelDescription(
        name="outrider-target-12m",
        tokenizer_fingerprint="ab" * 32,
        vocab_size=4096,
        max_model_len=2048,
        dtype="bfloat16",
    )
    load = types_pb2.Load(num_running=3, num_waiting=2, num_used_blocks=90, num_blocks=2**33)
    return {
        "speculate_request": draft_pb2.SpeculateRequest(
            open=[
                draft_pb2.Open(
                    sequence=2**64 - 1,
                    token_ids=[5, 6, 4095],
                    num_prompt_tokens=2,
                    sampling=sampling,
                    noise_key=types_pb2.NoiseKey(low=2**63 + 1, high=17),
                    num_speculative_tokens=4,
                    window=10,
                    shape=1,
                ),
                draft_pb2.Open(
                    sequence=9,
                    token_ids=[1],
                    num_prompt_tokens=1,
                    sampling=types_pb2.SamplingParams(top_p=1.0, repetition_penalty=1.0),
                    noise_key=types_pb2.NoiseKey(low=1, high=2),
                    window=34,
                ),
            ],
            advance=draft_pb2.Advance(
                sequences=[11, 12],
                bases=[100, 7],
                lengths=[2, 0],
                token_ids=[300, 301],
                num_speculative_tokens=[5, 0],
                shapes=[0, 2],
            ),
            close=[13, 14],
            shapes=[draft_pb2.Shape(parents=[0, 1, 1]), draft_pb2.Shape(parents=[0, 0])],
        ),
        "speculate_request_of_chains": draft_pb2.SpeculateRequest(
            advance=draft_pb2.Advance(sequences=[1], bases=[2], lengths=[1], token_ids=[3], num_speculative_tokens=[4])
        ),
        "speculate_reply": draft_pb2.SpeculateReply(
            proposals=draft_pb2.Proposals(
                sequences=[21, 22],
                bases=[40, 41],
                lengths=[3, 2],
                token_ids=[1, 2, 3, 4, 5],
                parents=[0, 1, 1, 0, 1],
            ),
            lost=[23],
            refused=[24, 25],
            timing=draft_pb2.Timing(held_us=1500, step_us=800, batch=2),
            credit=draft_pb2.Credit(num_tokens=123456),
        ),
        "speculate_reply_of_chains": draft_pb2.SpeculateReply(
            proposals=draft_pb2.Proposals(sequences=[21], bases=[40], lengths=[2], token_ids=[1, 2])
        ),
        "generate_commands": target_pb2.GenerateCommands(
            start=[
                target_pb2.StartCall(
                    call=31,
                    request=target_pb2.GenerateRequest(
                        request_id="cmpl-1",
                        prompt_token_ids=[9, 8, 7],
                        num_generated_tokens=1,
                        sampling=sampling,
                        seed=-(2**63),
                        choice_index=1,
                        max_tokens=64,
                        ignore_eos=True,
                        num_speculative_tokens=0,
                    ),
                )
            ],
            cancel=[32, 33],
        ),
        "generate_replies": target_pb2.GenerateReplies(
            calls=[41, 42, 43],
            num_tokens=[2, 0, 1],
            token_ids=[70, 71, 72],
            finished=[43],
            finish_reasons=[target_pb2.FINISH_REASON_STOP],
            num_rounds=[2, 0, 1],
            num_draft_tokens=[4, 3, 5],
            num_accepted_tokens=[1, 0, 5],
            errors=[target_pb2.CallError(call=42, code=3, message="the prompt is empty", param="prompt")],
        ),
        "draft_description": draft_pb2.DraftDescription(model=model, load=load, epoch=2**64 - 2),
        "target_description": target_pb2.TargetDescription(
            model=model,
            load=load,
            epoch=2**64 - 1,
            num_speculative_tokens=4,
            max_speculative_tokens=16,
            num_draft_links=1,
            num_draft_links_configured=2,
            eos_token_ids=[0, 2],
        ),
        "model_description": model,
    }


def descriptors() -> descriptor_pb2.FileDescriptorSet:
    files = descriptor_pb2.FileDescriptorSet()
    for module in (types_pb2, draft_pb2, target_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    return files


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    written = {
        name: {"type": message.DESCRIPTOR.full_name, "hex": message.SerializeToString(deterministic=True).hex()}
        for name, message in messages().items()
    }
    (folder / "messages.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    (folder / "descriptors.bin").write_bytes(descriptors().SerializeToString(deterministic=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
