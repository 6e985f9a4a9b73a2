"""The words of the report, English and Chinese side by side, with {} to be filled in, and the digits of its figures."""

LANGUAGES = ("en", "zh-CN")

PHRASES = {
    # what stands at the top
    "title": ("Did the fine-tuning help?", "微调有效果吗？"),
    "simulated": (
        "**Made on a simulated Ascend, not on hardware**: the numbers show that the path works, "
        "not how fast or how well it does on a card.",
        "**模拟昇腾（simulated Ascend）**：以下数字来自模拟硬件，只说明流程可以走通，不代表真实 NPU 上的速度与效果。",
    ),
    "adapter_changes_nothing": (
        "**Warning**: the adapter changes nothing: each row has the same loss and the same answer with and without it. "
        "It was not loaded, or it was not trained.",
        "**警告**：适配器没有带来任何变化，每条数据的损失与回答在加载前后完全相同。它可能没有被加载，或者没有经过训练。",
    ),
    "other_dataset": (
        "**Warning**: these rows are not the ones that the run held out: their data set has another hash. "
        "Some of them may have been trained on.",
        "**警告**：评测数据并非该次训练留出的数据（数据集哈希不同），其中可能包含训练过的样本。",
    ),
    "fewer_rows": (
        "**Note**: {rows} of the {held_out} held-out rows were evaluated.",
        "**注意**：{held_out} 条留出数据中只评测了 {rows} 条。",
    ),
    "unfinished": ("**Note**: the training run has not finished.", "**注意**：训练尚未完成。"),
    # the conclusion in words
    "helped": (
        "Yes: the held-out loss fell, as {rows} rows show.",
        "有效果：留出数据的损失下降（依据 {rows} 条数据）。",
    ),
    "hurt": (
        "No: the held-out loss rose, as {rows} rows show.",
        "没有，反而变差：留出数据的损失上升（依据 {rows} 条数据）。",
    ),
    "mixed": (
        "Partly: the held-out loss shows a difference on {rows} rows, but another metric went the other way.",
        "部分有效：{rows} 条数据上留出损失有差异，但另有指标朝相反方向变化。",
    ),
    "no_effect": ("{rows} rows show no difference in the held-out loss.", "在 {rows} 条数据上看不出留出损失的差异。"),
    "too_few": (
        "{rows} rows are too few to tell whether it helped: at least {fewest} are needed.",
        "只有 {rows} 条数据，无法判断是否有效：至少需要 {fewest} 条。",
    ),
    "said_needed": (
        "A difference as large as the one seen here would take about {needed:,} rows to show (in four evaluations of five).",
        "要确认与此处所见同样大小的差异，大约需要 {needed:,} 条数据（五次评测中有四次能看出）。",
    ),
    "too few rows": ("too few rows", "数据太少"),
    "said_better": ("The adapter is **better** in {names}.", "适配器在 {names} 上**更好**。"),
    "said_worse": ("The adapter is **worse** in {names}.", "适配器在 {names} 上**更差**。"),
    "said_longer": ("Its answers are longer.", "回答变长了。"),
    "said_shorter": ("Its answers are shorter.", "回答变短了。"),
    "said_none": ("No difference is shown in {names}.", "在 {names} 上看不出差异。"),
    # base against adapter
    "comparison": ("Base against adapter", "基座与适配器对比"),
    "metric": ("metric", "指标"),
    "base": ("base", "基座"),
    "adapter": ("adapter", "适配器"),
    "difference": ("difference", "差值"),
    "interval": ("95 % interval", "95% 区间"),
    "verdict": ("the adapter is", "适配器"),
    "better": ("better", "更好"),
    "worse": ("worse", "更差"),
    "longer": ("longer", "更长"),
    "shorter": ("shorter", "更短"),
    "no difference shown": ("no difference shown", "看不出差异"),
    "how_to_read": (
        "Difference: adapter − base on the same rows, with its 95 % interval by a paired bootstrap (too narrow on a few rows). "
        "The verdicts come from a sign-flip test, not from the intervals: when nothing has changed, the held-out loss, which "
        "decides the headline, is called different in at most 4 of 100 evaluations, and any metric at all in at most 5 "
        "(Holm's correction). ↑ higher is better, ↓ lower is better.",
        "差值 = 适配器 − 基座，取自同一批数据，95% 区间由配对自助法（paired bootstrap）得到（数据很少时偏窄）。结论由符号翻转"
        "检验（sign-flip test）给出，并不取自区间：若实际毫无变化，决定结论的留出损失在 100 次评测中至多 4 次被误判为有差异，"
        "所有指标合计至多 5 次（Holm 校正）。↑ 越高越好，↓ 越低越好。",
    ),
    "other_sets": ("Other sets of rows", "其他数据集"),
    "other_sets_text": (
        "Asked like the held-out rows. Where the adapter is worse, training has cost something that the base could do; each set "
        "has a verdict of its own, so that of many sets some differ by chance.",
        "提问方式与留出数据相同。若适配器在此变差，说明训练损害了基座原有的能力；每个数据集单独下结论，数据集越多，越可能有偶然的差异。",
    ),
    # what was trained
    "trained": ("What was trained, and on what", "训练了什么，用了什么数据"),
    "base_model": ("base model", "基座模型"),
    "method": ("method", "方法"),
    "method_value": (
        "LoRA, r {lora_r}, alpha {lora_alpha}, dropout {lora_dropout}, on {modules}",
        "LoRA，r {lora_r}，alpha {lora_alpha}，dropout {lora_dropout}，作用于 {modules}",
    ),
    "parameters": ("trainable parameters", "可训练参数"),
    "parameters_value": ("{trainable:,} of {total:,} ({share:.3%})", "{trainable:,} / {total:,}（{share:.3%}）"),
    "data": ("data set", "数据集"),
    "rows": ("rows", "数据量"),
    "rows_value": (
        "{train} trained, {eval} held out; of {rows_read} read, {rejected} rejected, {truncated} truncated, "
        "{duplicates} duplicates",
        "训练 {train} 条，留出 {eval} 条；共读入 {rows_read} 条，其中拒收 {rejected} 条，截断 {truncated} 条，重复 {duplicates} 条",
    ),
    "target_tokens": ("target tokens", "目标词元"),
    "target_tokens_value": ("{train:,} trained, {eval:,} held out", "训练 {train:,}，留出 {eval:,}"),
    "asked": ("asked", "提问方式"),
    "asked_value": (
        "{thinking:,} rows with a thought, {plain:,} without; each held-out row is asked as it would be trained, of base and "
        "adapter alike, and what stands after the thought is scored",
        "{thinking:,} 条带思考，{plain:,} 条不带；每条留出数据均按训练时的方式提问，基座与适配器相同，只对思考之后的内容评分",
    ),
    "steps": ("steps", "训练步数"),
    "steps_value": (
        "{steps}, {epochs:g} epoch(s); global batch {global_batch_size} = {per_device_train_batch_size} per device × "
        "{gradient_accumulation_steps} accumulation × {world_size} ranks",
        "{steps} 步（{epochs:g} 轮）；全局批大小 {global_batch_size} = 每卡 {per_device_train_batch_size} × 累积 "
        "{gradient_accumulation_steps} × {world_size} 个进程",
    ),
    "learning_rate": ("learning rate", "学习率"),
    "learning_rate_value": (
        "{learning_rate:g}, {lr_scheduler_type}, warm-up {warmup_ratio:.0%}, seed {seed}",
        "{learning_rate:g}，{lr_scheduler_type}，预热 {warmup_ratio:.0%}，随机种子 {seed}",
    ),
    "hardware": ("hardware", "硬件"),
    "weights": ("base weights", "基座权重类型"),
    "cost": ("cost", "开销"),
    "cost_value": (
        "{train_time_s:,.0f} s, {tokens_per_s:,.0f} tokens/s, peak memory per rank {peak} GiB",
        "{train_time_s:,.0f} 秒，每秒 {tokens_per_s:,.0f} 词元，每个进程的峰值内存 {peak} GiB",
    ),
    "train_loss": ("training loss", "训练损失"),
    "train_loss_value": (
        "first step {first_loss:.4f}, last step {last_loss:.4f}",
        "首步 {first_loss:.4f}，末步 {last_loss:.4f}",
    ),
    "delivered": ("adapter delivered", "交付的适配器"),
    "delivered_best": (
        "of step {step}, with the lowest held-out loss, {loss} (last step, {other_step}: {other_loss})",
        "第 {step} 步，留出损失最低，为 {loss}（末步，第 {other_step} 步：{other_loss}）",
    ),
    "delivered_last": (
        "of the last step, {step}, held-out loss {loss} (lowest: {other_loss}, of step {other_step})",
        "末步，第 {step} 步，留出损失 {loss}（最低 {other_loss}，第 {other_step} 步）",
    ),
    "delivered_only": ("of the last step, {step}, held-out loss {loss}", "末步，第 {step} 步，留出损失 {loss}"),
    "versions": ("versions", "版本"),
    # the other sections
    "curves": ("Curves", "曲线"),
    "curves_text": (
        "The loss of each training step and of the held-out rows; then each held-out row's loss by its length.",
        "上图：每个训练步的损失与留出数据的损失；下图：每条留出数据的长度与损失。",
    ),
    "answers": ("All answers side by side", "全部回答对照"),
    "losses_only": ("Losses only: the models were not asked to answer.", "只计算了损失，没有让模型作答。"),
    "search": ("Search questions and answers", "搜索问题与回答"),
    "gained": ("Gained most (chrF)", "进步最大（chrF）"),
    "lost": ("Lost most (chrF)", "退步最大（chrF）"),
    "loss_gained": ("Loss fell most", "损失下降最多"),
    "loss_lost": ("Loss rose most", "损失上升最多"),
    "in_order": ("In order", "原始顺序"),
    "more": ("Show more", "显示更多"),
    "chart": ("− 0 +", "− 0 +"),
    "best": ("Answers that gained most", "进步最大的回答"),
    "worst": ("Answers that lost most", "退步最大的回答"),
    "no_examples": ("None.", "无。"),
    "question": ("Question", "问题"),
    "reference": ("reference", "参考答案"),
    "leaks": ("Held-out questions that training saw", "训练数据中出现过的留出问题"),
    "leak_value": ("{held_out} ≈ {train} ({similarity:.2f})", "{held_out} ≈ {train}（{similarity:.2f}）"),
    "no_leaks": ("None, neither exactly nor nearly.", "没有发现相同或相近的问题。"),
    "metrics": ("The metrics", "指标说明"),
    "signature": ("Signature", "复现签名"),
}
METRICS = {
    "loss": ("nats per target token: sum over all rows / all target tokens", "每个目标词元的损失（nat），全部数据合计"),
    "perplexity": ("e^loss", "困惑度，即 e^loss"),
    "exact_match": ("answers equal to the reference after normalisation, 0–1", "归一化后与参考答案完全相同的比例，0–1"),
    "token_f1": ("words in common with the reference, F1, 0–1", "与参考答案的词重合度 F1，0–1"),
    "rougeL": ("longest common subsequence of words, F1, 0–1", "最长公共词子序列 F1，0–1"),
    "bleu": ("corpus BLEU, 0–100", "语料级 BLEU，0–100"),
    "chrf": ("corpus chrF2, 0–100", "语料级 chrF2，0–100"),
    "stop_rate": ("answers that ended by themselves, 0–1", "自行结束的回答比例，0–1"),
    "empty_rate": ("empty answers, which count as wrong, 0–1", "空回答比例（按答错计），0–1"),
    "truncated_rate": ("answers cut at the token limit, 0–1", "因长度上限被截断的回答比例，0–1"),
    "repetition": ("word 4-grams that stood before in the same answer, 0–1", "回答内部重复出现的四词组比例，0–1"),
    "mean_length": ("words per answer", "平均每个回答的词数"),
}


def format_value(name: str, value: float, signed: bool = False) -> str:
    """Returns a metric's value, or with `signed` a difference of it, with the digits that its scale deserves."""
    digits = {"perplexity": 3, "bleu": 2, "chrf": 2, "mean_length": 2}.get(name, 4)
    return f"{value:{'+' if signed and value else ''}.{digits}f}"
