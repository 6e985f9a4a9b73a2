"""What is written or printed shows no secret, and says all else as it was."""

import json
import socket

import pytest

from sft import masking

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.dozjgNryP4J3jVmNHl0w5N"
KEY = "MIIEowIBAAKCAQEA0Z3VS5JJcds3xfn"
SECRETS = [  # text, what must not be in the masked text, what must be
    ("Authorization: Bearer 7f3k-QmZ.x_91", "7f3k", "Authorization: Bearer"),
    ("authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz", "Basic"),
    ('{"Authorization": "token 0a1b2c3d4e5f"}', "0a1b2c3d4e5f", '"Authorization": "token'),
    ("Proxy-Authorization: Digest username=\"wei\", response=\"6629fae49393\"", "wei", "Digest"),
    ("Authorization: AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/2026/us-east-1, Signature=fe5f80f7", "fe5f80", "AWS4"),
    ("curl -H 'Authorization: Bearer zz9-secret-1' https://x.cn/v1", "zz9", "https://x.cn/v1"),
    ("the server wants Bearer abc123def456ghi", "abc123", "the server wants Bearer"),
    ("x-api-key: 5d41402abc4b2a76", "5d41402", "x-api-key:"),
    ("X-Auth-Token: 5d41402abc4b2a76b9719d911017c592", "5d41402", "X-Auth-Token"),
    ("Cookie: sessionid=38afes7a8; csrftoken=u32t4o3", "38afes7a8", "Cookie:"),
    ("Set-Cookie: id=a3fWa; Expires=Wed, 21 Oct 2026", "a3fWa", "Set-Cookie:"),
    ("aws_access_key_id = AKIAIOSFODNN7EXAMPLE", "AKIAIOSF", "aws_access_key_id"),
    ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "wJalr", "AWS_SECRET_ACCESS_KEY="),
    ("temporary ASIAIOSFODNN7EXAMPLE", "ASIAIOSF", "temporary"),
    ("AWS_SESSION_TOKEN=IQoJb3JpZ2luX2VjEXAMPLE", "IQoJb3", "AWS_SESSION_TOKEN"),
    ("Aliyun LTAI5tFexample12345abc", "LTAI5t", "Aliyun"),
    ("TENCENTCLOUD_SECRET_ID=AKIDz8krbsJ5yKBZQpn74WFkmLPx3EXAMPLE", "AKIDz8", "TENCENTCLOUD_SECRET_ID"),
    ("OBS_SECRET_KEY: 9bPq2xExampleKeyOfHuawei", "9bPq2x", "OBS_SECRET_KEY"),
    (f"jwt {JWT} end", "eyJ", "jwt "),
    (f"id_token={JWT}", "eyJ", "id_token="),
    (f"-----BEGIN RSA PRIVATE KEY-----\n{KEY}\nabcd\n-----END RSA PRIVATE KEY-----\nafter", "MIIEow", "after"),
    (f"-----BEGIN OPENSSH PRIVATE KEY-----\n{KEY}", "MIIEow", ""),
    (json.dumps({"key": f"-----BEGIN PRIVATE KEY-----\n{KEY}\n-----END PRIVATE KEY-----\n", "b": 1}), "MIIEow", '"b": 1'),
    ("-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQOYBF4\n-----END PGP PRIVATE KEY BLOCK-----", "lQOYBF4", ""),
    ("Server=db;Database=x;Uid=sa;pwd=Winter2026;Encrypt=yes", "Winter2026", "Encrypt=yes"),
    ("DB_PASS=sesame", "sesame", "DB_PASS="),
    ("password: hunter22", "hunter22", "password:"),
    ('password = "correct horse battery"', "horse", "password ="),
    ("{'user': 'wei', 'password': 'two words', 'port': 22}", "words", "'port': 22"),
    ('{"dbPassword":"a\\"b c","port":5432}', "b c", '"port":5432'),
    ('log: {\\"password\\": \\"inner one\\", \\"n\\": 1}', "inner", '\\"n\\": 1'),
    ("--password s3cr3t --port 22", "s3cr3t", "--port 22"),
    ("args: --password=s3cr3t --port 22", "s3cr3t", "--port 22"),
    ("['train.py', '--hub_token', 'abcdef0123', '--seed', '1']", "abcdef0123", "'--seed', '1'"),
    ("passphrase is opensesame7, then enter", "opensesame", "then enter"),
    ("PGPASSWORD=pg-word psql", "pg-word", "psql"),
    ("machine h.cn login wei password tulip9", "tulip9", "machine h.cn"),
    ("sshpass -p tulip9 ssh node2", "tulip9", "ssh node2"),
    ("mysql -u root -ptulip9 data", "tulip9", "mysql -u root"),
    ("docker login -u wei -p tulip9 swr.cn", "tulip9", "swr.cn"),
    ("curl -u wei:tulip9 http://h.cn/a", "tulip9", "http://h.cn/a"),
    ("密码：春天2026，请勿外传", "春天2026", "请勿外传"),
    ("口令是 abc-9", "abc-9", "口令"),
    ("git clone https://wei:tulip9@h.cn/a.git", "tulip9", "h.cn/a.git"),
    ("http_proxy=http://me:pw@proxy.local:3128/", "me:pw", "proxy.local:3128"),
    ("redis://:tulip9@10.0.0.1:6379/0", "tulip9", "6379"),
    ("https://b.s3.amazonaws.com/w.bin?X-Amz-Credential=AKID%2F2026&X-Amz-Signature=fe5f80f77d5f&X-Amz-Expires=60", "fe5f80", "X-Amz-Expires=60"),
    ("https://b.oss-cn.aliyuncs.com/w?OSSAccessKeyId=LTA9x&Expires=17&Signature=vjbyPx%3D", "vjbyPx", "Expires=17"),
    ("https://a.blob.core.windows.net/c/w?sv=2024&sig=Zz%2Bq9&se=2026", "Zz%2Bq9", "sv=2024"),
    ("https://maps.cn/api?key=AbCdEf123&q=x", "AbCdEf123", "q=x"),
    ("https://oapi.dingtalk.com/robot/send?access_token=66f1a2b3c4", "66f1a2", "robot/send"),
    ("https://hooks.slack.com/services/T00000000/B00000000/XXXXXXXXXXXX", "B00000000", "hooks.slack.com"),
    ("AccountName=x;AccountKey=Zm9vYmFyYmF6==;EndpointSuffix=core", "Zm9vYmFy", "EndpointSuffix=core"),
    ("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyzABCDEFGH", "hf_abc", "HF_TOKEN="),
    ("token hf_abcdefghijklmnopqrst in a sentence", "hf_abc", "in a sentence"),
    ("sk-proj-4f9aX_example-0123456789", "sk-proj", ""),
    ("key sk-0123456789abcdef", "sk-0123", "key"),
    ("ghp_16C7e42F292c6912E7710c838347Ae178B4a", "ghp_", ""),
    ("github_pat_11ABCDEFG0abcdefghij_klmnop", "github_pat", ""),
    ("glpat-Xy12abcdEFGH34567890", "glpat", ""),
    ("xoxb-123456789012-abcdefABCDEF", "xoxb", ""),
    ("AIzaSyA-1234567890abcdefghijklmnopqrstu", "AIza", ""),
    ("npm_abcdefghijklmnopqrstuvwxyz0123456789", "npm_", ""),
    ("//registry.npmjs.org/:_authToken=0123-4567-89ab", "0123-4567", "registry.npmjs.org"),
    ("pypi-AgEIcHlwaS5vcmcCJDAwMDAwMDAw", "AgEI", ""),
    ("MODELSCOPE_API_TOKEN=ms-12345678-90ab-cdef-1234-567890abcdef", "ms-1234", "MODELSCOPE_API_TOKEN"),
    ("WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567", "0123456", "WANDB_API_KEY="),
    ("SWANLAB_API_KEY: aB3dE6gH9jK2", "aB3dE6", "SWANLAB_API_KEY"),
    ("bot 110201543:AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw1", "AAHdq", "bot"),
    ("root:$6$rounds$abcdefghijklmnopqrstuv:19000", "abcdefgh", "root:"),
    ("client_secret: 8f14e45fceea167a", "8f14e4", "client_secret:"),
    ("apiKey: 'Zx81-aaaa'", "Zx81", "apiKey:"),
    ("stripe rk_live_51HexampleKey99", "rk_live", "stripe"),
    ("SG.abcdefghijklmnopqrst.uvwxyzABCDEFGHIJKLMNOPQ", "abcdefgh", ""),
]  # fmt: skip
HARMLESS = [
    "361 training rows, 19 held out. Global batch 4 = 1 per device × 2 accumulation × 2 ranks on cpu: 91 steps an epoch, 91 in all.",
    "step 3/91: loss 2.4180, learning_rate 2.00e-04, grad_norm 1.31, 4 rows, 373 tokens, target_tokens: 120",
    '{"tokens": {"train": 31264, "eval": 1501}, "target_tokens": {"train": 20101}, "token_f1": 0.43}',
    '{"tokenizer_sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "signature": "rougeL:words"}',
    "eos_token: <|im_end|>, pad_token: '<|endoftext|>', eos_token_id=151645, unk_token: [UNK]  bos_token=None",
    "max_new_tokens: 64; tokens_per_s: 2314.8; rank_tokens_min=91",
    "ImportError: libhccl.so: cannot open shared object file: No such file or directory",
    "RuntimeError: ACL stream synchronize failed, error code:507015",
    "Token indices sequence length is longer than the maximum: 612 > 512",
    "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True HCCL_CONNECT_TIMEOUT=600 HCCL_IF_BASE_PORT=60000",
    "The key of the pair is question: answer; the primary key: id, keys: q, a; monkey=banana",
    "first pass: 0.31 s, forward_pass=0.2, PASS: 12, passed: 560, bypass: 1",
    "no password was given; the password file --password_file /etc/x; author: Wei; authority=none",
    "git@github.com: cloning https://github.com/Ascend/pytorch?tab=readme&page=2#readme",
    "model_name_or_path: Qwen/Qwen2.5-7B-Instruct  # a comment\nseed: 42\nkey: value",
    "huggingface_hub.errors.LocalEntryNotFoundError in hf_hub_download, hf_transfer, npm_config_registry",
    "driver 24.1.0.3 firmware 7.5.0.5.220 bus 0000:C1:00.0 at 12:30:11 mac 00:1a:2b:3c:4d:5e",
    "use_auth_token=True, token=None, api_key=$OPENAI_API_KEY, password: <ask>, token: ${TOKEN}",
    "Bearer authentication is the basic configuration of secret sharing",
    "task-force-12345678 risk-adjusted-99 sk-learn",
    "SSH without a password is needed, and the password is wrong",
    "问题：如何重置密码？ 回答：打开设置。",
    "2026-11-19-11:14:58.516.606 [PID: 528886] EI0006: Getting socket times out. Remote Rank did not send the data in time.",
    "checkpoint-30/optimizer.safetensors  sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    'File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode\n    raise JSONDecodeError("Expecting value", s, err.value)',
]


@pytest.mark.parametrize(("text", "hidden", "kept"), SECRETS)
def test_a_secret_is_not_shown(text, hidden, kept):
    masked = masking.mask(text)
    assert hidden in text and hidden not in masked
    assert kept in masked and masking.SECRET in masked
    assert masking.mask(masked) == masked


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text):
    assert masking.mask(text) == text


def test_the_tables_are_of_some_size():
    assert len(SECRETS) >= 55 and len(HARMLESS) >= 20


def test_variables_are_masked_by_name_and_by_form():
    variables = {
        "ACCELERATE_HF_TOKEN": "some value of six", "NCCL_NET_AUTH": "wei:tulip9", "HCCL_CONNECT_TIMEOUT": "600",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "ACCELERATE_PROXY": "http://me:pw@h:1", "NCCL_KEY": "",
    }  # fmt: skip
    assert masking.mask_variables(variables) == {
        **variables, "ACCELERATE_HF_TOKEN": "<secret>", "NCCL_NET_AUTH": "<secret>", "ACCELERATE_PROXY": "http://<secret>@h:1",
    }  # fmt: skip


def test_people_and_machines_are_not_named_and_versions_are(monkeypatch):
    monkeypatch.setenv("USER", "wangwei")
    host = socket.gethostname()
    text = (
        f"on {host} for wangwei at /home/zhang/run and 10.1.2.3:29500 mail a.b@c.cn fe80::1:2 driver 24.1.0.3 firmware "
        "7.5.0.5.220 local 127.0.0.1 mac 00:1a:2b:3c:4d:5e password: hunter22 at 12:30:11 bus 0000:C1:00.0"
    )
    masked = masking.anonymise(text, keep=("24.1.0.3",))
    for secret in (f"on {host}", "wangwei", "zhang", "10.1.2.3", "a.b@c.cn", "fe80", "00:1a", "hunter22"):
        assert secret not in masked, secret
    for kept in ("24.1.0.3", "7.5.0.5.220", "127.0.0.1", "29500", "12:30:11", "0000:C1:00.0"):
        assert kept in masked, kept
