"""docs/models.md and its translation, from the outcomes that the families' test has noted (`make families`).

python -m tools.models_page OUTCOMES.jsonl
"""

import json
import sys
from pathlib import Path

from sft.artifacts import library_versions, write_text

DOCS = Path(__file__).resolve().parent.parent / "docs"
ENGLISH = """# Families of models

[中文](zh-CN/models.md)

Made by `make families` with transformers {transformers}, torch {torch} and PEFT {peft}: a tiny random checkpoint of each class goes through preparation, training on two CPU processes with a stop and a resume, evaluation and export; the merged model's logits are compared with those of PEFT's own base and adapter.

| class in transformers | adapted | rows | training loss over four steps | merged model, error |
|---|---|---|---|---|
{table}

- Whether rows may share a forward is asked of the loaded weights, at every start: a row behind two different neighbours is compared with the row alone. Where layers mix tokens otherwise than by attention, each row gets a forward of its own inside the micro-batch; the line that says so names the difference. Kernels that keep rows apart (flash-linear-attention, mamba-ssm) change the answer by themselves.
- `--target_modules` names layers of the language model; what a model has for images or sound stays as it is. `--target_modules all-linear` is every linear layer but the head, as PEFT means it; PEFT refuses it for Mamba layers (Falcon-H1, Nemotron-H): name q_proj, k_proj, v_proj and o_proj there.
- Experts are no linear layers in transformers 5: adapters of a mixture of experts sit on attention and on shared layers. On DeepSeek-V3 PEFT takes all-linear to mean the experts' tensors too; export.py refuses to merge such an adapter and says so.
- Refused by name: gpt_oss (attention sinks), models with a soft cap on attention scores (Gemma 2), quantised checkpoints (train on the unquantised model).
- Nothing of this table was run on Ascend hardware, and a tiny random checkpoint says nothing about a real one's quality.
"""
CHINESE = """# 各系列模型

[English](../models.md)

由 `make families` 生成，用的是 transformers {transformers}、torch {torch} 和 PEFT {peft}：每个类各造一个随机的微型检查点，依次经过数据准备、两个 CPU 进程上的训练（中途停下再续训）、评估和导出；合并后模型的 logits 与 PEFT 自己的“基座 + 适配器”相比较。

| transformers 中的类 | 适配的层数 | 数据行 | 四步的训练损失 | 合并后模型的误差 |
|---|---|---|---|---|
{table}

- 多行能否共用一次前向，每次启动都在加载后的权重上实测：把同一行放在两个不同的邻居之后，与它单独计算的结果比较。若有的层不靠注意力混合 token，则在微批之内每行单独前向，日志会写明相差多少。能把各行分开的内核（flash-linear-attention、mamba-ssm）会自然改变这一结论。
- `--target_modules` 指的是语言模型中的层；模型中处理图像或声音的部分保持不变。`--target_modules all-linear` 是除输出头以外的所有线性层，与 PEFT 的含义相同；对 Mamba 层（Falcon-H1、Nemotron-H）PEFT 会拒绝它：请在那里写 q_proj、k_proj、v_proj 和 o_proj。
- 在 transformers 5 中专家不是线性层：混合专家模型的适配器放在注意力层和共享层上。在 DeepSeek-V3 上，PEFT 把 all-linear 理解为也包括专家的张量；export.py 会拒绝合并这样的适配器并说明原因。
- 点名拒绝：gpt_oss（attention sinks）、对注意力分数设软上限的模型（Gemma 2）、量化的检查点（请在未量化的模型上训练）。
- 这张表没有任何一项在昇腾硬件上运行过；随机的微型检查点也不能说明真实模型的质量。
"""
WORDS = {True: ("packed", "打包"), False: ("one per forward", "每行单独前向")}


def main(path: str) -> None:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    found = {outcome["class"]: outcome for outcome in map(json.loads, lines)}
    versions = library_versions()
    for language, (file, text) in enumerate(((DOCS / "models.md", ENGLISH), (DOCS / "zh-CN" / "models.md", CHINESE))):
        table = "\n".join(row(found[name], language) for name in sorted(found))
        write_text(
            file, text.format(table=table, **{name: versions[name] for name in ("transformers", "torch", "peft")})
        )


def row(outcome: dict, language: int) -> str:
    """A line of the table."""
    targets = " ".join(outcome["targets"])
    return (
        f"| {outcome['class']} | {outcome['adapted']} ({targets}) | {WORDS[outcome['packed']][language]} | "
        f"{outcome['first_loss']:.3f} → {outcome['last_loss']:.3f} | {outcome['largest_error']:.0e} |"
    )


if __name__ == "__main__":
    main(sys.argv[1])
