"""Who makes the artifacts of a sweep: this machine, or nodes of a cluster; one file each."""
