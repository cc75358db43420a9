package main

// The golden vectors of tests/golden that a client needs: `second-client golden FOLDER`.

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
)

type vectors struct{ checked int }

func (v *vectors) same(what string, found, expected any) {
	v.checked++
	a, b := string(writeJSON(found)), string(writeJSON(expected))
	if a != b {
		fmt.Printf("%s:\n  found    %.400s\n  expected %.400s\n", what, a, b)
		os.Exit(1)
	}
}

func (v *vectors) refused(what string, code any, read func()) {
	found := "read"
	if r := attempt(read); r != nil {
		found = r.code
	}
	v.same("refused: "+what, found, code)
}

func unhex(text any) []byte {
	data, err := hex.DecodeString(text.(string))
	if err != nil {
		panic(err)
	}
	return data
}

func load(folder, name string) object {
	text, err := os.ReadFile(filepath.Join(folder, name))
	if err != nil {
		panic(err)
	}
	return readObject(text)
}

func checkGolden(folder string) {
	v := &vectors{}
	recorded := load(folder, "vectors.json")
	v.bytes(recorded)
	v.optimisers(recorded["optimisers"].(object))
	v.refusals(load(folder, "refused.json"))
	v.secure(load(folder, "secure.json"))
	fmt.Printf("%d golden vectors hold\n", v.checked)
}

func (v *vectors) bytes(of object) {
	p := make([]byte, 0, 10240)
	for i := 0; i < 10240; i++ {
		p = append(p, byte(i))
	}
	v.same("sha256 of P", sha256Of(p), of["p"].(object)["sha256"])
	v.same("block", hex.EncodeToString(writeBlock(0, 1, 0, []byte("hello"))), of["block_hello"])
	marked := of["block_hello_marked"].(object)
	v.same("marked block", hex.EncodeToString(writeBlock(0, 1, 513, []byte("hello"))), marked["block"])
	hello := manifest{size: 5, block: 4096}
	data, mark := readBlock(hello, 0, unhex(marked["block"]), true)
	v.same("its mark", []any{string(data), int(mark)}, []any{"hello", 513})
	m := manifest{sha: sha256Of(p), size: 10240, block: 4096, kind: "program"}
	for i, header := range list(of["block_headers_of_p"]) {
		body := p[i*4096 : i*4096+int(m.bytesOf(int64(i)))]
		v.same("block of P", hex.EncodeToString(writeBlock(int64(i), 3, 0, body)[:16]), header)
	}
	v.same("manifest", string(writeJSON(m.json())), of["manifest_of_p"])
	bitmap := of["bitmap"].(object)
	have := []any{}
	for i := int64(0); i < 10; i++ {
		if holds(readBitmap(bitmap["base64"], 10), i) {
			have = append(have, i)
		}
	}
	v.same("bitmap", have, bitmap["have"])
	shard := of["shard"].(object)
	v.same("shard", int(crc32.ChecksumIEEE([]byte("dev-1"))%4), shard["shard"])
	s := schema{{"fc.weight", "p", []int{2, 3}}, {"fc.bias", "p", []int{2}}, {"bn.running_mean", "b", []int{2}}}
	v.same("schema", s.sha(), of["schema"].(object)["sha256"])
	vector := numbers(of["vector"])
	v.same("a model, read back", toAny(readVector(writeVector("model", "", s, vector), s, "model")), toAny(vector))
	file, decoded := writeI8(sha256Of(p), s, vector)
	length := binary.LittleEndian.Uint64(file)
	header, data := readObject(file[8:8+length]), file[8+length:]
	part := func(name string) []byte {
		at := list(header[name].(object)["data_offsets"])
		return data[at[0].(int64):at[1].(int64)]
	}
	i8 := of["i8"].(object)
	v.same("i8", []any{hex.EncodeToString(part("fc.weight")), hex.EncodeToString(part("fc.weight#s"))}, []any{"408120000000", i8["s"]})
	v.same("i8, decoded", toAny([]float64{decoded[1], decoded[6]}), []any{-2.0, 0.25})
	ring := newKeyring([]string{of["key"].(object)["public"].(string)})
	sig := of["signature_of_p"].(string)
	v.same("signature", ring.verify("demo", "program", m.sha, m.size, "56475aa75463474c", sig), true)
	v.same("another federation's", ring.verify("home", "program", m.sha, m.size, "56475aa75463474c", sig), false)
	for _, topic := range list(of["topics"]) {
		checkTopic(topic.(string))
	}
	spelled := of["spelled"].(object)
	for name, text := range spelled {
		v.same(name, string(writeJSON(readJSON([]byte(text.(string))))), text)
	}
	for _, name := range []string{"cat", "stop", "rebirth", "go", "err", "near, the answer", "near, none fits", "near, how it fits"} {
		readMessage([]byte(spelled[name].(string)))
	}
	v.same("signed coord", ring.knows("demo", readMessage([]byte(spelled["coord, signed"].(string)))), true)
	v.same("unsigned coord", ring.knows("demo", readMessage([]byte(spelled["coord"].(string)))), false)
	batches := of["batches"].(object)
	g := newPCG64(7)
	v.same("batches", []any{toAny(g.permutation(10)), toAny(g.permutation(10))}, []any{batches["first_pass"], batches["second_pass"]})
	held := of["held_out"].(object)
	w := &work{client: &client{}}
	w.train.x = make([][]float64, held["n"].(int64))
	v.same("held-out samples", toAny(w.rows(object{"rows": held["rows"]})), toAny(numbers(held["weights"])))
	noise := newPCG64(7, 0)
	v.same("noise", []any{noise.float32() * (1 << 24), noise.float32() * (1 << 24)}, toAny(numbers(list(of["noise"].(object)["first"])[:2])))
	v.goldenRun(of["golden"].(object))
}

// goldenRun draws all inputs of the golden run of an engine without a fixed batch.
func (v *vectors) goldenRun(of object) {
	p := readProgram([]byte(of["program"].(string)), "onnx")
	sum := sha256.New()
	put := func(values []float64) {
		for _, x := range values {
			binary.Write(sum, binary.LittleEndian, float32(x))
		}
	}
	d := newGoldenDraw(7)
	drawn := d.state(p, 0.5)
	for _, in := range p.step {
		put(drawn[in.name])
	}
	put([]float64{0.25, 0.5, 0.25}) // lr, momentum and mu
	for _, rows := range []int{5, 5, 3} {
		fresh := d.fresh(p, rows)
		for _, in := range p.step {
			put(fresh[in.name])
		}
	}
	for _, sign := range d.signs(p.schema.size()) {
		sum.Write([]byte{byte(int8(sign))})
	}
	v.same("inputs of a golden run", hex.EncodeToString(sum.Sum(nil)), of["inputs"].(object)["any"])
}

func (v *vectors) refusals(of object) {
	each := func(name string, read func(input []any)) {
		for _, line := range list(of[name]) {
			input := list(line)
			v.refused(name+": "+string(writeJSON(input)), input[len(input)-1], func() { read(input) })
		}
	}
	hello := manifest{size: 5, block: 4096}
	s := schema{{"fc.weight", "p", []int{2, 3}}, {"fc.bias", "p", []int{2}}, {"bn.running_mean", "b", []int{2}}}
	each("json", func(in []any) { readJSON([]byte(in[0].(string))) })
	each("manifests", func(in []any) { readManifest(in[0]) })
	each("blocks", func(in []any) { readBlock(hello, 0, unhex(in[0]), false) })
	each("bitmaps", func(in []any) { readBitmap(in[0], 10) })
	each("topics", func(in []any) { checkTopic(in[0].(string)) })
	each("files", func(in []any) { readVector(unhex(in[0]), s, "model") })
	each("programs", func(in []any) { readProgram([]byte(in[0].(string)), "onnx") })
	for _, line := range list(of["messages"]) {
		if in := list(line); in[0] == "t" { // the others are a coordinator's to read
			v.refused("message "+in[1].(string), in[2], func() { readMessage([]byte(in[1].(string))) })
		}
	}
}
