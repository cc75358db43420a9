BEGIN TRANSACTION;
CREATE TABLE closings (
    run text, round integer, exchange integer, cid text, primary key (run, round, exchange, cid)) without rowid;
INSERT INTO "closings" VALUES('5c9c375a7890d281',1,0,'d00');
INSERT INTO "closings" VALUES('5c9c375a7890d281',1,0,'d01');
INSERT INTO "closings" VALUES('5c9c375a7890d281',1,0,'d02');
INSERT INTO "closings" VALUES('5c9c375a7890d281',1,0,'d03');
INSERT INTO "closings" VALUES('5c9c375a7890d281',1,1,'d00');
INSERT INTO "closings" VALUES('5c9c375a7890d281',1,1,'d01');
INSERT INTO "closings" VALUES('5c9c375a7890d281',1,1,'d02');
INSERT INTO "closings" VALUES('5c9c375a7890d281',1,1,'d03');
CREATE TABLE devices (cid text primary key, n integer not null, engine text not null) without rowid;
INSERT INTO "devices" VALUES('d00',40,'onnx');
INSERT INTO "devices" VALUES('d01',41,'onnx');
INSERT INTO "devices" VALUES('d02',42,'onnx');
INSERT INTO "devices" VALUES('d03',43,'onnx');
CREATE TABLE events (id integer primary key, line text not null);
INSERT INTO "events" VALUES(1,'{"event":"start","unix_ms":1700000001000,"epoch":1,"federation":"test","rounds":{"fesem":2},"needs":4}');
INSERT INTO "events" VALUES(2,'{"event":"program","unix_ms":1700000001000,"model":"softmax","parity":{"onnx":null},"seconds":0.0}');
INSERT INTO "events" VALUES(3,'{"event":"joined","unix_ms":1700000001000,"device":"d00","engine":"onnx","n":40}');
INSERT INTO "events" VALUES(4,'{"event":"joined","unix_ms":1700000001000,"device":"d01","engine":"onnx","n":41}');
INSERT INTO "events" VALUES(5,'{"event":"joined","unix_ms":1700000001000,"device":"d02","engine":"onnx","n":42}');
INSERT INTO "events" VALUES(6,'{"event":"joined","unix_ms":1700000001000,"device":"d03","engine":"onnx","n":43}');
INSERT INTO "events" VALUES(7,'{"event":"round","run":"fesem","method":"fesem","round":1,"of":2,"accuracy":{"micro":0.975,"macro":0.9750000000000001},"f1_of_devices":{"weighted":0.9725274725274724,"unweighted":0.9725274725274726},"f1_pooled":0.9731322272498742,"per_device":{"d00":1.0,"d01":1.0,"d02":0.95,"d03":0.95},"per_center":[0.975,0.975],"loss":{"micro":0.7363169617942746,"macro":0.7363169617942747},"loss_per_device":{"d00":0.7376977444744843,"d01":0.8324540000858363,"d02":0.6661035883409364,"d03":0.7090125142758418},"loss_per_center":[0.7019006664077103,0.770733257180839],"assignment":{"d00":0,"d01":1,"d02":0,"d03":1},"bytes":{"down":16188,"up":11424},"seconds":0.0}');
CREATE TABLE exchanges (
    run text, round integer, exchange integer, left_ms integer not null, closed integer not null default 0,
    primary key (run, round, exchange)) without rowid;
INSERT INTO "exchanges" VALUES('5c9c375a7890d281',1,0,300000,1);
INSERT INTO "exchanges" VALUES('5c9c375a7890d281',1,1,300000,1);
INSERT INTO "exchanges" VALUES('5c9c375a7890d281',2,0,300000,0);
CREATE TABLE journal (
    run text, round integer, place integer, what text not null, said text not null, task_round integer,
    primary key (run, round, place)) without rowid;
CREATE TABLE late (
    run text, round integer, exchange integer, cid text, sha256 text not null, size integer not null,
    n integer not null, what text not null, base text not null, seconds real not null, shown integer not null default 0,
    primary key (run, round, exchange, cid)) without rowid;
CREATE TABLE meta (key text primary key, value text not null) without rowid;
INSERT INTO "meta" VALUES('epoch','1');
INSERT INTO "meta" VALUES('lesson','{"codec": "f32", "federation": "test", "model": {"batch-size": 8, "engines": ["onnx"], "name": "softmax"}, "runs": [{"batch-size": 8, "clusters": 2, "local-steps": 3, "method": "fesem", "name": "fesem", "restarts": 3, "rounds": 2}], "seed": 3}');
INSERT INTO "meta" VALUES('program','{"program": "2929ac30fd8fb164afcb3277f7b86e9dcc53e4373d06540bbaec980374649eaf", "initial": "24b8958878c3c69fbb9cdfc6da3f7ba524807474f2b25b078d680d9b0c5521bc"}');
INSERT INTO "meta" VALUES('scales/5c9c375a7890d281','{"delta": 0.15527354150943634, "delta peak": 0.4769137352705002}');
INSERT INTO "meta" VALUES('schema','4');
CREATE TABLE prekeys (
    cid text, number integer, keys blob not null, run text, round integer, exchange integer,
    primary key (cid, number)) without rowid;
CREATE TABLE refusals (
    run text, round integer, exchange integer, cid text, reason text not null,
    primary key (run, round, exchange, cid)) without rowid;
CREATE TABLE replies (
    run text, round integer, exchange integer, cid text, sha256 text not null, size integer not null,
    n integer not null, what text not null, base text not null, seconds real not null,
    primary key (run, round, exchange, cid)) without rowid;
INSERT INTO "replies" VALUES('5c9c375a7890d281',1,0,'d00','c91dadc91d8a37bcc03180aecb03f92fdcb652a002cb610ee365007a14e790fb',464,40,'delta','20711212f5c3523dd7c723330ee0c94d0c8b259d03a0deae6bd420c002e9e340',0.0);
INSERT INTO "replies" VALUES('5c9c375a7890d281',1,0,'d01','427d94141ed0c0dd477577d19692fa5c2368e230c20fa43002da8e48c66282a0',464,41,'delta','20711212f5c3523dd7c723330ee0c94d0c8b259d03a0deae6bd420c002e9e340',0.0);
INSERT INTO "replies" VALUES('5c9c375a7890d281',1,0,'d02','d452744ccbba1c475192f074492dae69c9c0977caefd597d8e454430a3fe8ac5',464,42,'delta','20711212f5c3523dd7c723330ee0c94d0c8b259d03a0deae6bd420c002e9e340',0.0);
INSERT INTO "replies" VALUES('5c9c375a7890d281',1,0,'d03','eb1fafdc74182d5040655c84af404f5364137222c10bcddb75d3f747fdba2b0f',464,43,'delta','20711212f5c3523dd7c723330ee0c94d0c8b259d03a0deae6bd420c002e9e340',0.0);
INSERT INTO "replies" VALUES('5c9c375a7890d281',1,1,'d00','e3cb111f703e56cf925fee650195e20f4b1d4d36462bf34f34fa3f3d57e8dd1a',424,20,'stats','',0.0);
INSERT INTO "replies" VALUES('5c9c375a7890d281',1,1,'d01','ac16a9aa23c2da8041eea7d9037bd3b3300f1fce3e7bc51c72b69b0f17d5abd1',424,20,'stats','',0.0);
INSERT INTO "replies" VALUES('5c9c375a7890d281',1,1,'d02','12f0ee6c33150ba66601e18a643e5a52f2cc75ac9d441ba3e74fedd5023e8bc0',424,20,'stats','',0.0);
INSERT INTO "replies" VALUES('5c9c375a7890d281',1,1,'d03','db05889010c989a48558d4d3bf7108d23289ca92212fbac8fdb25b47d5821a1d',424,20,'stats','',0.0);
INSERT INTO "replies" VALUES('5c9c375a7890d281',2,0,'d00','8c9db382c19991213e332b93fc88b37466bd9709f171f64b93b49aca12ea0e1f',464,40,'delta','1319e6219d5c8602764163105d54901cfb23e9ec63f484a85fa5adbc5c671aae',0.0);
INSERT INTO "replies" VALUES('5c9c375a7890d281',2,0,'d01','a32ee93a9203f7c4933a88ce4cfa5b9c66f94bc8b161670d713dbd1a4f28ba44',464,41,'delta','de3d577e4444a6707834b6b373c2058ae3d9ab28bf01f1f5a28f8ec5f7f708e8',0.0);
INSERT INTO "replies" VALUES('5c9c375a7890d281',2,0,'d02','13a9cda94a476f65cf9618e1ad14dec231c570ae22c621a406a1aa728a58095d',464,42,'delta','1319e6219d5c8602764163105d54901cfb23e9ec63f484a85fa5adbc5c671aae',0.0);
CREATE TABLE runs (name text primary key, run text not null unique) without rowid;
INSERT INTO "runs" VALUES('fesem','5c9c375a7890d281');
CREATE TABLE states (run text, round integer, blob text not null, primary key (run, round)) without rowid;
INSERT INTO "states" VALUES('5c9c375a7890d281',0,'86a2d943ebf8ea434e5a00732d4a1efd9cd55fd75373b963af13b67736d6634b');
INSERT INTO "states" VALUES('5c9c375a7890d281',1,'20ec3153e1d963acba184e814dd40607bc090bc14fbe0e37c2c2f339b78c4887');
CREATE TABLE task_blobs (
    run text, round integer, exchange integer, sha256 text, primary key (run, round, exchange, sha256)) without rowid;
INSERT INTO "task_blobs" VALUES('5c9c375a7890d281',1,0,'20711212f5c3523dd7c723330ee0c94d0c8b259d03a0deae6bd420c002e9e340');
INSERT INTO "task_blobs" VALUES('5c9c375a7890d281',1,1,'1319e6219d5c8602764163105d54901cfb23e9ec63f484a85fa5adbc5c671aae');
INSERT INTO "task_blobs" VALUES('5c9c375a7890d281',1,1,'de3d577e4444a6707834b6b373c2058ae3d9ab28bf01f1f5a28f8ec5f7f708e8');
INSERT INTO "task_blobs" VALUES('5c9c375a7890d281',2,0,'1319e6219d5c8602764163105d54901cfb23e9ec63f484a85fa5adbc5c671aae');
INSERT INTO "task_blobs" VALUES('5c9c375a7890d281',2,0,'de3d577e4444a6707834b6b373c2058ae3d9ab28bf01f1f5a28f8ec5f7f708e8');
CREATE TABLE tasks (
    run text, round integer, exchange integer, cid text, sha256 text not null,
    primary key (run, round, exchange, cid)) without rowid;
INSERT INTO "tasks" VALUES('5c9c375a7890d281',1,0,'d00','bf06511172aa81f5edbad39687f26f1f48aa8e278145db668f58641937d8dee0');
INSERT INTO "tasks" VALUES('5c9c375a7890d281',1,0,'d01','fa16fb1e90e268e86c3c810fa79552f6054d1bb6f846395ae16d9d061a2b7e6e');
INSERT INTO "tasks" VALUES('5c9c375a7890d281',1,0,'d02','7b7a1ec04a0314851e6f2821241f3da4d10e0b9ec599cc476d42135a2d195e3b');
INSERT INTO "tasks" VALUES('5c9c375a7890d281',1,0,'d03','1e27e41d7fd9f72825b4b3540c7abb91e65bd1a51cf877a9064e2643ade95c17');
INSERT INTO "tasks" VALUES('5c9c375a7890d281',1,1,'d00','bbec8bdc35cc39bcc721617c00d01e3d8e77a28611db5c29301c65f695f6f1c9');
INSERT INTO "tasks" VALUES('5c9c375a7890d281',1,1,'d01','18c96b84004c7ca8d7dfc058a07efd7f54932d11779da9ba9cc23d784f719434');
INSERT INTO "tasks" VALUES('5c9c375a7890d281',1,1,'d02','bbec8bdc35cc39bcc721617c00d01e3d8e77a28611db5c29301c65f695f6f1c9');
INSERT INTO "tasks" VALUES('5c9c375a7890d281',1,1,'d03','18c96b84004c7ca8d7dfc058a07efd7f54932d11779da9ba9cc23d784f719434');
INSERT INTO "tasks" VALUES('5c9c375a7890d281',2,0,'d00','e3f514d569fd1344e08665589b09abcec290dc62547f7ad705842485927294be');
INSERT INTO "tasks" VALUES('5c9c375a7890d281',2,0,'d01','971e0b38fe876f50bba57dd91a52be6f7760b1a34d4e3abe3e847306b17233b6');
INSERT INTO "tasks" VALUES('5c9c375a7890d281',2,0,'d02','1908b93b8920873c6e38ffb3aaf84d39a9954d60f4000ea7b727a257a05305e1');
INSERT INTO "tasks" VALUES('5c9c375a7890d281',2,0,'d03','fd40721a8dd793e573d512784f00a49359c21b1296a4a1a550f40e2f22902549');
CREATE INDEX events_by_kind on events (json_extract(line, '$.event'), json_extract(line, '$.run'));
COMMIT;
