"""Sign an artifact, and check a signature: OpenSSF model signing 1.1, as the library `model-signing` does it
(https://github.com/ossf/model-signing-spec).

The signature holds the SHA-256 of everything that deploys, of optkit.json and of the bill of materials.
What later commands write anew is not signed: scorecards, their files, verification.json and the model
card. Nothing here needs the network.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from optkit.artifact import Artifact
from optkit.common.atomic import draft_of
from optkit.common.files import read_object
from optkit.common.own_files import ATTACHMENTS, CARD, NUMBERS, OWN_FILES, RECORD, SIGNATURE
from optkit.errors import ArtifactError, UnsoundError, UsageError, first_line, needing
from optkit.verification.artifact_checks import check_digests
from optkit.verification.model_files import Check, check_of

DRAFTS = tuple(draft_of(Path(name)).name for name in sorted({*OWN_FILES, CARD}))
UNSIGNED = (*sorted(NUMBERS), ATTACHMENTS, CARD, SIGNATURE, ".cache", *DRAFTS)
"""In `.cache` the hub's library notes what it downloaded. A command that was killed leaves drafts."""
PASSWORD = "OPTKIT_KEY_PASSWORD"
CURVES = "P-256, P-384 or P-521"
MAKE_ONE = "Make one: openssl ecparam -name prime256v1 -genkey -noout -out key.pem"
FOUND = (
    (r"Hash mismatch for \\*'([^'\\]*)", "was changed"),
    (r"Missing files in model \\*'[^']*': ([^\"'\\]*)", "is missing"),
    (r"Extra files found in model \\*'[^']*': ([^\"'\\]*)", "was added"),
)
"""What the library says of files, and what is said here.
Its text is the repr of a list: a digest with a quote in it puts backslashes before the others.
"""
T = TypeVar("T")


@dataclass(frozen=True)
class Trusted:
    """Whose signatures count: a public key's, or those below a root certificate.
    Without either they are the operating system's certificates.
    """

    public_key: Path | None = None
    certificate: Path | None = None


def sign(artifact: Artifact, key: Path, certificate: Path | None = None) -> Path:
    """Sign an artifact with a private key of an elliptic curve, and return the signature's file.

    `certificate` is of this key, with those that it stands on below it. `$OPTKIT_KEY_PASSWORD` opens
    an encrypted key. Raises UnsoundError if a file was lost or changed, UsageError for a key or
    certificate that will not do, ArtifactError for links in the artifact.
    """
    hashing, signing, _ = _library()
    if not (whole := check_digests(artifact)).ok:
        why = "A signature says that the files are those that the recipe made"
        raise UnsoundError(whole.detail, where=str(artifact.directory), why=why, remedy="Run its recipe again")
    password = os.environ.get(PASSWORD, "").encode() or None
    config = signing.Config().set_hashing_config(hashing.Config().set_ignored_paths(paths=UNSIGNED))
    with_key = partial(config.use_elliptic_key_signer, private_key=key, password=password)
    _opened(with_key, key, f"is no private key of the curves {CURVES} in PEM that can be opened", MAKE_ONE)
    if certificate:
        what = "is no certificate in PEM of this key"
        chain = {"signing_certificate": certificate, "certificate_chain": [certificate]}
        with_both = partial(config.use_certificate_signer, private_key=key, **chain)
        _opened(with_both, certificate, what, "Name the one that was made for it")
        if late := _expired(certificate.read_bytes()):
            raise UsageError(late, where=str(certificate), remedy="Have it renewed")
    with artifact.attaching(SIGNATURE) as made:
        try:
            config.sign(artifact.directory, made)
        except ValueError as error:
            why, remedy = _of_links(error) or first_line(error), "Copy what it leads to"
            raise ArtifactError("it cannot be signed", where=str(artifact.directory), why=why, remedy=remedy) from error
    return artifact.directory / SIGNATURE


def check_signature(artifact: Artifact, trusted: Trusted) -> Check:
    """Return whether those who are trusted signed an artifact as it is. Raises UsageError for a key
    or certificate that will not do, or none.
    """
    _, _, verifying = _library()
    file = artifact.directory / SIGNATURE
    if not file.is_file():
        return Check(name="signature", ok=False, detail=f"there is no {SIGNATURE}: nobody signed it")
    try:
        if not isinstance(material := read_object(file, ArtifactError).get("verificationMaterial"), dict):
            raise ArtifactError("it has no material to verify it by")
    except ArtifactError as error:
        return Check(name="signature", ok=False, detail=f"{SIGNATURE} is no signature: {error.what}")
    config = _verifier(verifying, trusted, "publicKey" in material)
    try:
        config.verify(artifact.directory, file)
        if left := _unsigned(artifact, file):
            return Check(name="signature", ok=False, detail=f"it leaves out {', '.join(left[:3])}")
    except Exception as error:  # of json, protobuf, cryptography or OpenSSL
        return check_of("signature", _problems(error, trusted), "")
    chain = (material.get("x509CertificateChain") or {}).get("certificates") or []
    by = trusted.public_key or trusted.certificate or "the system's certificates"
    late = [said for each in chain[:1] if (said := _expired(str(each["rawBytes"])))]
    return check_of("signature", late, f"every file is as it was signed; {by} vouches for it")


def _unsigned(artifact: Artifact, file: Path) -> list[str]:
    """Return the files of the model that a signature says nothing of: its maker names what it ignores."""
    payload = json.loads(b64decode(json.loads(file.read_bytes())["dsseEnvelope"]["payload"]))
    signed = {PurePosixPath(each["name"]) for each in payload["predicate"]["resources"]}
    return [name for name in sorted({RECORD, *artifact.record.files}) if PurePosixPath(name) not in signed]


def _verifier(verifying: Any, trusted: Trusted, of_key: bool) -> Any:
    config = verifying.Config()
    if of_key and not trusted.public_key:
        why = "It was signed with a key and no certificate"
        raise UsageError(
            "the signature needs a public key", where="--signature", why=why, remedy="Add --public-key PEM"
        )
    if not of_key and trusted.public_key:
        what, why = "the signature is of a certificate", "A public key alone does not tell whom it was made for"
        raise UsageError(what, where="--public-key", why=why, remedy="Name its root: --certificate PEM")
    if key := trusted.public_key:
        what = f"is no public key of the curves {CURVES} in PEM"
        remedy = "Make one of the private key: openssl ec -in key.pem -pubout -out public.pem"
        return _opened(partial(config.use_elliptic_key_verifier, public_key=key), key, what, remedy)
    roots = [trusted.certificate] if trusted.certificate else []
    use = partial(config.use_certificate_verifier, certificate_chain=roots)
    return _opened(use, trusted.certificate or Path(), "is no certificate in PEM", "Name that of the root")


def _problems(error: Exception, trusted: Trusted) -> list[str]:
    """Return what is wrong with a signature, from what the library raised."""
    said = str(error)
    if "Signature mismatch" in said:
        found = [(name, what) for form, what in FOUND for names in re.findall(form, said) for name in names.split(", ")]
        return [f"{name} {what} after it was signed" for name, what in found] or [said]
    if "Key mismatch" in said:
        return [f"it was made with another key than that of {trusted.public_key}"]
    if links := _of_links(error):
        return [f"{links}. Copy the artifact with the files that links lead to"]
    if type(error).__name__ == "InvalidSignature":
        return [f"{SIGNATURE} was changed: it does not fit its own words"]
    if type(error).__name__ == "X509StoreContextError":
        return [f"its certificate does not lead to a trusted one: {said}"]
    return [f"{SIGNATURE} cannot be read as a signature: {first_line(error)}"]


def _of_links(error: Exception) -> str:
    """Return what to say of a link, which may lead to other bytes later; else empty."""
    found = re.match(r"Cannot use '(.*)' because it is a symlink", str(error))
    return f"{found[1]} is a link, and what a link leads to can change" if found else ""


def _opened(use: Callable[[], T], file: Path, what: str, remedy: str) -> T:
    """Return what `use` returns; a key or certificate that it cannot take is the user's mistake."""
    try:
        return use()
    except AttributeError as error:  # a key without a curve
        raise UsageError(what, where=str(file), why="It is of another kind", remedy=remedy) from error
    except Exception as error:  # an OSError or a ValueError
        why = getattr(error, "strerror", None) or first_line(error)
        raise UsageError(what, where=str(file), why=why, remedy=remedy) from error


def _expired(certificate: bytes | str) -> str:
    """Return what is wrong with the time of a certificate, as PEM or base64 of DER; else empty.
    A signature has no time of its own that could be trusted.
    """
    from cryptography import x509

    if isinstance(certificate, str):
        found = x509.load_der_x509_certificate(b64decode(certificate))
    else:
        found = x509.load_pem_x509_certificate(certificate)
    until, now = found.not_valid_after_utc, datetime.now(UTC)
    return f"its certificate was valid until {until:%Y-%m-%d}, and it is {now:%Y-%m-%d}" if now > until else ""


def _library() -> tuple[Any, Any, Any]:
    with needing("model-signing", SIGNATURE, "optkit[sign]"):
        from model_signing import hashing, signing, verifying
    return hashing, signing, verifying
