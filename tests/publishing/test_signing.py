"""Signatures of artifacts: made and checked by commands, and by `model_signing` itself."""

import builtins
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optkit import pipeline
from optkit.artifact import read_artifact
from optkit.publishing import signing
from optkit.publishing.signing import Trusted, check_signature
from tests.support.command_line import spoken

ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
signers = pytest.importorskip("tests.support.signers")

Spoken = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("keys")
    for name in ("key", "other"):
        signers.key_pair(place, name)
    return place


@pytest.fixture(scope="module")
def signed(tiny_run: Path, keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from optkit.publishing.signing import sign

    artifact = shutil.copytree(tiny_run / "out", tmp_path_factory.mktemp("signed") / "out")
    assert sign(read_artifact(artifact), keys / "key.pem") == artifact / "model.sig"
    return artifact


@pytest.fixture
def artifact(signed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(signed, tmp_path / "out")


def said_of(artifact: Path, keys: Path, status: int, capsys: Spoken) -> str:
    words = ("verify", str(artifact), "--signature", "--public-key", str(keys / "key.pub.pem"), "--json")
    said = json.loads(spoken(capsys, *words, status=status)[0])
    assert said["checks"][0]["name"] == "signature"
    assert said["checks"][0]["ok"] is (status == 0)
    return str(said["checks"][0]["detail"])


def test_its_own_command_line_takes_it(artifact: Path, keys: Path) -> None:
    words = ["verify", "key", artifact, "--signature", artifact / "model.sig", "--public_key"]
    run = [sys.executable, "-m", "model_signing", *words]
    good = subprocess.run([*run, keys / "key.pub.pem"], capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stderr
    assert "Verification succeeded" in good.stdout + good.stderr


def test_from_the_command_line(tiny_run: Path, keys: Path, tmp_path: Path, capsys: Spoken) -> None:
    artifact = shutil.copytree(tiny_run / "out", tmp_path / "out")
    public = str(keys / "key.pub.pem")
    words = ("verify", str(artifact), "--public-key", public)
    assert "there is no model.sig: nobody signed it" in spoken(capsys, *words, status=3)[0]
    out, _ = spoken(capsys, "sign", str(artifact), "--key", str(keys / "key.pem"))
    assert out == f"{artifact / 'model.sig'}\n"
    assert "every check holds; no engine was asked" in spoken(capsys, *words)[0]


def test_pages_may_be_written_later(artifact: Path, keys: Path, capsys: Spoken) -> None:
    for name in ("scorecard.json", "scorecard.html", "verification.json", "README.md", "scorecard_files/more.txt"):
        (artifact / name).parent.mkdir(exist_ok=True)
        (artifact / name).write_text("later", encoding="utf-8")
    assert said_of(artifact, keys, 0, capsys).startswith("every file is as it was signed; ")


def flip(artifact: Path) -> None:
    content = bytearray((artifact / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (artifact / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (flip, "model.safetensors was changed after it was signed"),
        (lambda out: (out / "evil.py").write_text("1"), "evil.py was added after it was signed"),
        (lambda out: (out / "tokenizer.json").unlink(), "tokenizer.json is missing after it was signed"),
        (
            lambda out: (out / "optkit.json").write_text((out / "optkit.json").read_text().replace("int4", "int8")),
            "optkit.json was changed after it was signed",
        ),
        (lambda out: (out / "model.sig").write_text("{"), "model.sig is no signature: cannot be read as JSON"),
        (
            lambda out: (out / "model.sig").write_text('{"verificationMaterial": {"publicKey": {}}}'),
            "model.sig cannot be read as a signature",
        ),
    ],
    ids=["flipped", "added", "missing", "recipe", "no JSON", "no signature"],
)
def test_what_was_changed_is_named(
    artifact: Path, keys: Path, capsys: Spoken, change: Callable[[Path], Any], said: str
) -> None:
    change(artifact)
    assert said in said_of(artifact, keys, 3, capsys)


def test_forged_words(artifact: Path, keys: Path, capsys: Spoken) -> None:
    bundle = json.loads((artifact / "model.sig").read_text(encoding="utf-8"))
    payload = bundle["dsseEnvelope"]["payload"]
    bundle["dsseEnvelope"]["payload"] = f"{payload[:100]}{'A' if payload[100] != 'A' else 'B'}{payload[101:]}"
    (artifact / "model.sig").write_text(json.dumps(bundle), encoding="utf-8")
    assert said_of(artifact, keys, 3, capsys) == "model.sig was changed: it does not fit its own words"


def test_keys_that_will_not_do(
    artifact: Path, keys: Path, tmp_path: Path, capsys: Spoken, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str, status: int = 2) -> str:
        return spoken(capsys, words[0], str(artifact), *words[1:], status=status)[1 if status == 2 else 0]

    other = str(keys / "other.pub.pem")
    assert "it was made with another key than that of" in refused("verify", "--public-key", other, status=3)
    assert "--signature: the signature needs a public key. It was signed with a key" in refused("verify", "--signature")
    (tmp_path / "no.pem").write_text("no key", encoding="utf-8")
    private, public = signers.rsa_pair(tmp_path)
    for name in ("no.pem", "gone.pem", public.name):
        said = refused("verify", "--public-key", str(tmp_path / name))
        assert f"{name}: is no public key of the curves P-256, P-384 or P-521 in PEM." in said
    odd, _ = signers.key_pair(tmp_path, "odd", curve=ec.SECP256K1())
    locked, _ = signers.key_pair(tmp_path, "locked", password=b"secret")
    for key in (tmp_path / "no.pem", tmp_path / "gone.pem", private, odd, locked):
        said = refused("sign", "--key", str(key))
        assert f"{key.name}: is no private key of the curves P-256, P-384 or P-521 in PEM that can be opened." in said
        assert "openssl ecparam" in said
        assert ("It is of another kind." in said) == (key == private)
    monkeypatch.setenv("OPTKIT_KEY_PASSWORD", "secret")
    spoken(capsys, "sign", str(artifact), "--key", str(locked))
    assert "secret" not in (artifact / "model.sig").read_text(encoding="utf-8")


def test_certificates(
    artifact: Path, keys: Path, tmp_path: Path, capsys: Spoken, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate, root = signers.certificates(tmp_path, 30)
    sign = ("sign", str(artifact), "--key", str(key), "--certificate")
    verify = ("verify", str(artifact), "--signature", "--certificate")
    spoken(capsys, *sign, str(certificate))
    assert f"{root} vouches for it" in spoken(capsys, *verify, str(root), "--json")[0]
    other_key, other, other_root = signers.certificates(tmp_path, 5)
    assert "does not lead to a trusted one" in spoken(capsys, *verify, str(other_root), status=3)[0].replace("\n", " ")
    assert "does not lead to a trusted one" in check_signature(read_artifact(artifact), Trusted()).detail
    said = spoken(capsys, "verify", str(artifact), "--public-key", str(keys / "key.pub.pem"), status=2)[1]
    assert "--public-key: the signature is of a certificate. A public key alone" in said
    assert "is no certificate in PEM." in spoken(capsys, *verify, str(key), status=2)[1]
    assert "is no certificate in PEM of this key." in spoken(capsys, *sign, str(other), status=2)[1]
    late = ("sign", str(artifact), "--key", str(other_key), "--certificate", str(other))
    assert "its certificate was valid until" in spoken(capsys, *late, status=2)[1]
    with monkeypatch.context() as patched:
        patched.setattr("optkit.publishing.signing._expired", lambda certificate: "")
        spoken(capsys, *late)
    assert "its certificate was valid until" in spoken(capsys, *verify, str(other_root), status=3)[0]


def test_what_is_not_whole_is_not_signed(artifact: Path, keys: Path, capsys: Spoken) -> None:
    (artifact / "link").symlink_to(artifact / "config.json")
    err = spoken(capsys, "sign", str(artifact), "--key", str(keys / "key.pem"), status=1)[1]
    assert "it cannot be signed. " in err
    assert "out/link is a link, and what a link leads to can change. Copy what it leads to." in err
    said = check_signature(read_artifact(artifact), Trusted(keys / "key.pub.pem")).detail
    assert said.endswith("what a link leads to can change. Copy the artifact with the files that links lead to")
    flip(artifact)
    err = spoken(capsys, "sign", str(artifact), "--key", str(keys / "key.pem"), status=3)[1]
    assert "model.safetensors was changed. A signature says that the files are those that the recipe made." in err


def test_engines_are_asked_by_name_alone(artifact: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = pipeline.verify_artifact
    monkeypatch.setattr(
        pipeline, "verify_artifact", lambda *a, **kw: asked.append(kw["engines"]) or real(*a, **{**kw, "engines": ()})
    )
    found = pipeline.verify(
        artifact, engines=("vllm",), signed_by=Trusted(keys / "key.pub.pem"), device="cpu", tokens=8
    )
    assert asked == [("vllm",)]
    assert [check.name for check in found.checks][:2] == ["signature", "digests"]
    assert found.whole


def test_without_the_extra(artifact: Path, keys: Path, monkeypatch: pytest.MonkeyPatch, capsys: Spoken) -> None:
    real = builtins.__import__

    def none(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "model_signing":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", none)
    err = spoken(capsys, "sign", str(artifact), "--key", str(keys / "key.pem"), status=1)[1]
    assert "the package `model-signing` is not installed. Run: pip install 'optkit[sign]'" in err


@pytest.mark.parametrize("digest", [b"x", b"'", b"\"'"])
def test_a_digest_with_quotes_hides_no_name(digest: bytes) -> None:
    """What the library says is the repr of a list of texts with reprs of bytes in them."""
    said = [f"Hash mismatch for 'optkit.json': Expected 'Digest({digest!r})'", "Extra files found in model '/a': b.py"]
    assert signing._problems(ValueError(f"Signature mismatch: {said}"), signing.Trusted()) == [
        "optkit.json was changed after it was signed",
        "b.py was added after it was signed",
    ]


def test_a_signature_that_leaves_out_the_weights_vouches_for_nothing(
    artifact: Path, keys: Path, capsys: Spoken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing, "UNSIGNED", (*signing.UNSIGNED, "model.safetensors"))
    signing.sign(read_artifact(artifact), keys / "key.pem")
    assert said_of(artifact, keys, 3, capsys) == "it leaves out model.safetensors"


@pytest.mark.parametrize("material", ["5", "[]", '"publicKey"'])
def test_material_of_another_kind(artifact: Path, keys: Path, capsys: Spoken, material: str) -> None:
    (artifact / "model.sig").write_text(f'{{"verificationMaterial": {material}}}')
    assert said_of(artifact, keys, 3, capsys).startswith("model.sig is no signature")
