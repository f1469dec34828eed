"""Keys and certificates to sign with."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def key_pair(place: Path, name: str, password: bytes = b"", curve: ec.EllipticCurve | None = None) -> tuple[Path, Path]:
    """Write a private key of an elliptic curve and its public key, as PEM."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    return _written(place, name, key, BestAvailableEncryption(password) if password else NoEncryption())


def rsa_pair(place: Path) -> tuple[Path, Path]:
    return _written(place, "rsa", rsa.generate_private_key(65537, 2048), NoEncryption())


def certificates(place: Path, days: int) -> tuple[Path, Path, Path]:
    """Write a key, its certificate and the root that it stands on. It began ten days ago, and is valid for so many."""
    root_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = _certificate("root", "root", root_key, root_key, 3650, authority=True)
    made = _certificate("signer", "root", key, root_key, days, authority=False)
    private, _ = _written(place, f"signer{days}", key, NoEncryption())
    paths = place / f"signer{days}.crt", place / f"root{days}.crt"
    for path, each in zip(paths, (made, root), strict=True):
        path.write_bytes(each.public_bytes(Encoding.PEM))
    return private, *paths


def _certificate(
    name: str, by: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, days: int, authority: bool
) -> x509.Certificate:
    start = datetime.now(UTC) - timedelta(days=10)
    said = x509.KeyUsage(not authority, False, False, False, False, authority, authority, False, False)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, by)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(said, critical=True)
    )
    return builder.sign(signer, hashes.SHA256())


def _written(place: Path, name: str, key: Key, how: object) -> tuple[Path, Path]:
    private, public = place / f"{name}.pem", place / f"{name}.pub.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public
