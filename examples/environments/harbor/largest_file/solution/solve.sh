#!/bin/bash
cd /app/files
name=$(ls -S | head -n 1)
echo "$name" > ../answer.txt
rm "$name"
