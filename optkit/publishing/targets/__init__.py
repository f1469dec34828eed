"""The places that `optkit push` uploads to, one file each; the contract is in `base`."""
