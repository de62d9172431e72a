"""Choosing accelerators and nodes by name, and frameworks that do not run on them."""

from __future__ import annotations


def test_a_framework_that_was_asked_for_is_refused_where_it_does_not_run(run):
    question = "estimate llama-3-8b --gpu tpu-v5p --gpus 64 --seq-len 2048"
    refused = run(f"{question} --runtime nanotron --json")
    assert refused.code == 2 and refused.document["error"]["code"] == "runtime-hardware"
    assert "leave out --runtime" in refused.document["error"]["message"]
    priced = run(question)
    assert priced.code == 0 and "priced as if megatron ran there" in " ".join(priced.out.split())
    assert "runtime.hardware" in {row["field"] for row in run(f"{question} --json").document["assumptions"]}


def test_launches_of_it_are_neither_written_nor_checked(run, tmp_path):
    plan = str(tmp_path / "plan.toml")
    question = ("estimate", "llama-3-8b", "--gpu", "tpu-v5p", "--gpus", "64", "--seq-len", "2048", "--tp", "4")
    assert run(*question, "--save", plan).code == 0
    written = run("export", plan, "--to", "megatron", "--out", str(tmp_path / "out"))
    assert written.code == 2 and "would not start on tpu-v5p" in written.err and not (tmp_path / "out").exists()
    script = tmp_path / "train.sh"
    script.write_text(
        "torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
        "--num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 128256 "
        "--micro-batch-size 1 --global-batch-size 64 --bf16 --tensor-model-parallel-size 4\n"
    )
    checked = run("check", str(script), "--gpu", "tpu-v5p")
    assert checked.code == 2 and "would not start on tpu-v5p" in checked.err
    assert run("check", str(script), "--gpu", "h100-sxm").code in (0, 1)


def test_a_port_is_priced_and_named(run):
    priced = run("estimate llama-3-8b --gpu gaudi2 --gpus 64 --seq-len 2048 --runtime megatron")
    assert priced.code == 0 and "the vendor maintains a port" in " ".join(priced.out.split())


def test_a_node_is_chosen_with_gpu_or_with_cluster(run):
    for option in ("--gpu", "--cluster"):
        answer = run(f"estimate llama-3-8b {option} p5.48xlarge --gpus 16 --tp 2 --seq-len 2048 --json")
        links = answer.document["inputs"]["cluster"]["links"]
        assert answer.code == 0 and links[-1]["name"] == "efa" and links[-1]["cards"] == 32


def test_misspelt_nodes_are_met_with_the_nearest(run):
    for option in ("--gpu", "--cluster"):
        refused = run(f"estimate llama-3-8b {option} p5en.48xlrge --gpus 16")
        assert refused.code == 2 and "Did you mean p5en.48xlarge" in refused.err


def test_gpus_lists_nodes_and_other_names(run):
    listed = run("gpus")
    assert listed.code == 0 and "aws-p5en" in listed.out and "p5en.48xlarge" in listed.out
    document = run("gpus --json").document
    assert document["aliases"]["p5en.48xlarge"] == "aws-p5en" and len(document["gpus"]) >= 70
    assert all(row["host_memory_bytes"] for row in document["gpus"])
