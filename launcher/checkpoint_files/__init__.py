"""What checkpoints are on disk: folders, manifests, files of tensors, checksums. No torch.

[Note: a checkpoint is there, or it is not]
`DIR/TAG/manifest.json` names every file of a checkpoint; without it the folder is none. A new tag is written to
`DIR/.TAG.tmp`, and the folder is renamed when every file is on the disk. A tag that is there already gets further files
with other names, and then another manifest in place of the old one. So a checkpoint appears by one rename, and whatever
is killed before it leaves the previous one as it was.
"""
