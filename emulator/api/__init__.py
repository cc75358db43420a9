"""What `import fedcenters` names: values and functions of plain Python, over the same run as the command line's."""
